"""Several drafters side by side: who drafts for whom."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.fake_drafter import STEP, Fake, requests, round_of
from helpers.steps import Steps
from jaxspec.config import EngineConfig
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.plan import Lookahead, Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.selection import even_shares, select_for_slos, select_nodes
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.adaserve import AdaServe
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.chain import Chain
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy
from jaxspec.sched.spec.trees.sampled import SampledTree
from jaxspec.sched.timing import StepTimes
from jaxspec.step.packing import SamplingInputs

select = AdaServe.select
#: A device on which 32 tokens take as long as one.
FLAT = StepTimes({32: 10e-3, 256: 80e-3})


def chain(levels: int, probability: float) -> Candidates:
    ahead = np.arange(levels, dtype=np.int32)
    return Candidates(ahead, ahead - 1, ((ahead + 1) * np.log(probability)).astype(np.float32))


def test_the_cheaper_one_first_and_the_next_where_it_has_nothing() -> None:
    cheap, dear = Fake("cheap", 100, 1e-6, ["0", "2"]), Fake("dear", 200, 1e-3, ["0", "1", "2"])
    assert round_of(Speculator([dear, cheap], STEP), requests(4)) == {"0": 100, "1": 200, "2": 100}


def test_where_the_dearer_one_has_nothing_the_cheaper_one_drafts() -> None:
    cheap, dear = Fake("cheap", 100, 1e-6, ["0"]), Fake("dear", 200, 1e-4, [])
    speculator = Speculator([cheap, dear], STEP)
    running = requests(1)
    for _ in range(12):
        speculator._record(running[0], 0).observe(2.0, 0)  # the cheap one is bad for it
    assert speculator.lookahead(running, 0.0).levels
    assert speculator.proposals._preferences(running[0], 1) == [1, 0]
    assert round_of(speculator, running) == {"0": 100}


def test_a_request_goes_over_to_the_drafter_that_does_better_for_it() -> None:
    """The cheap one is right for request 0 only; the dear one for both."""
    everyone = ["0", "1"]
    speculator = Speculator([Fake("cheap", 100, 1e-6, everyone), Fake("dear", 200, 1.5e-3, everyone)], STEP)
    running = requests(2)
    for _ in range(60):
        for id, token in round_of(speculator, running).items():
            right = token == 200 or id == "0"
            speculator.observe(running[int(id)], range(2) if right else ())
    assert round_of(speculator, running) == {"0": 100, "1": 200}


def test_a_probe_is_for_one_request() -> None:
    """Drafts that are never accepted stop, and are then tried with the request that the drafter has most of."""
    speculator = Speculator([Fake("a", 100, 1e-4, ["0", "1", "2"])], STEP)
    running, drafted = requests(3), []
    for _ in range(600):
        drafted.append(list(round_of(speculator, running)))
        for id in drafted[-1]:
            speculator.observe(running[int(id)], ())
    assert drafted[0] == ["0", "1", "2"]
    assert {len(ids) for ids in drafted[100:]} == {0, 1}


def test_requests_that_are_gone_leave_no_state() -> None:
    speculator = Speculator([Fake("a", 100, 1e-6, ["0"])], STEP)
    running = requests(1)
    assert round_of(speculator, running)
    alive = ref(running.pop())
    assert alive() is None


def test_drafters_do_not_draft_for_a_step_without_space_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts fill the step: a round of drafting would be for nothing."""
    drafter = Fake("a", 100, 1e-6, ["0", "1"])
    speculator = Speculator([drafter], STEP, GlobalGreedy(), verify_budget=16)
    running = requests(2)
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running]
    asked = []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *given: asked.append(1) or propose(*given))
    assert speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(16, 99, 2), 0.0) == {} and not asked
    assert speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(15, 99, 2), 0.0) and asked


def with_slo(number: int, tpot: float | None, ahead: float = 0.0) -> Request:
    """Four tokens after its first, which came so that it is `ahead` seconds ahead of its SLO at time 0."""
    request = Request(str(number), 3, [1] * 8, 100, 0.0, computed=7, slo=Slo(tpot))
    request.first_token = ahead - 4 * (tpot or 0.0)
    return request


def drafted_for(running: list[Request], cost: float) -> list[str]:
    """With a drafter of which three of four drafts are accepted."""
    drafter = Fake("only", 100, cost, [r.id for r in running])
    speculator = Speculator([drafter], STEP, AdaServe(16, STEP, calibrated=True), verify_budget=32)
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 7, 1, ahead.drafts, ahead.levels) for r in running]
    return sorted(
        speculator.draft(
            scheduled, lambda _: SamplingInputs(), DraftRoom.of(Plan(tuple(scheduled), draft_nodes=99)), 0.0
        )
    )


def test_where_drafts_do_not_pay_only_requests_late_for_their_slo_get_some() -> None:
    """Twelve requests: with drafts for all, a step would take more than twice as long."""
    crowd = [with_slo(i, 0.1) for i in range(11)]
    assert len(drafted_for([with_slo(0, None), with_slo(1, None)], 1e-4)) == 2  # where they pay, all do
    assert drafted_for([*crowd, with_slo(15, 0.1)], 3e-3) == []
    assert drafted_for([*crowd, with_slo(15, 0.009)], 3e-3) == ["15"]
    assert drafted_for([*crowd, with_slo(15, 0.009, ahead=1.0)], 3e-3) == []


@pytest.mark.parametrize(("late", "levels"), [(0, 1), (1, 4)])
def test_drafts_are_deeper_for_a_request_that_needs_more_tokens_than_throughput_wants(late: int, levels: int) -> None:
    """Sixteen requests and steps that grow with every token: one level pays for all, four for the one that is late."""
    times = StepTimes({n: 10e-3 + 0.5e-3 * n for n in range(1, 200)})
    running = [with_slo(i, 10e-3 if i < late else 1.0) for i in range(16)]
    drafter = Fake("only", 100, 1e-3, [r.id for r in running])
    speculator = Speculator([drafter], times, AdaServe(16, times), verify_budget=64)
    assert speculator.lookahead(running, 0.0).levels == levels
    scheduled = [ScheduledRequest(r, 7, 1, levels, levels) for r in running]
    room = DraftRoom.of(Plan(tuple(scheduled), draft_nodes=99))
    drafts = speculator.draft(scheduled, lambda _: SamplingInputs(), room, 0.0)
    assert len(drafts["0"]) == levels
    # However late one is, no deeper than its own tokens per second rise.
    running[0].first_token = -1e6
    assert speculator.lookahead(running, 0.0).levels == 4


def test_the_shape_follows_the_budget() -> None:
    """AdaServe's Eq. 8 and 9: ceil(B / n) levels, as wide as floor(B / n) allows; nothing where n fill the budget."""
    running = [with_slo(i, 0.009) for i in range(8)]
    drafter = Fake("only", 100, 1e-4, list("01234567"))
    speculator = Speculator([drafter], STEP, AdaServe(16, calibrated=True), verify_budget=8)
    assert speculator.lookahead(running, 0.0).levels == 0
    assert speculator.lookahead(running[:3], 0.0).levels == 3
    assert speculator.lookahead(running[:1], 0.0).levels == 8


def test_needs_are_those_of_the_step_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the whole budget takes 30 ms, the one that pays 12 ms: so much time passes for the SLOs."""
    running = [with_slo(i, 12.5e-3) for i in range(8)]
    drafter = Fake("only", 100, 1e-7, [r.id for r in running])
    speculator = Speculator([drafter], STEP, AdaServe(16, STEP), verify_budget=64)
    needs: list[float] = []
    monkeypatch.setattr(AdaServe, "select", lambda self, step: needs.append(step.needs[0]) or select(self, step))
    for policy, expected in ((AdaServe(16, STEP), 12 / 12.5), (AdaServe(16), 30 / 12.5)):
        speculator.policy = policy
        ahead = speculator.lookahead(running, 0.0)
        scheduled = [ScheduledRequest(r, 7, 1, ahead.drafts, ahead.levels) for r in running]
        room = DraftRoom.of(Plan(tuple(scheduled), draft_nodes=99))
        speculator.draft(scheduled, lambda _: SamplingInputs(), room, 0.0)
        assert needs[-1] == pytest.approx(expected, rel=1e-3)


def test_needs_do_not_grow_from_a_step_that_only_they_would_make_long() -> None:
    """In 30 ms all requests would need enough nodes for a step of 30 ms; in 12 ms none needs any."""
    forest, policy = Forest([chain(4, 0.5) for _ in range(8)]), AdaServe(16, STEP)
    step = StepCandidates(forest, [4] * 8, 99, 56, [-inf] * 8, 8)
    seconds, needs = (lambda nodes: STEP.of(8 + nodes)), (lambda t: [t / 12.5e-3] * 8)
    full = select_nodes(policy, replace(step, needs=needs(30e-3)), [])
    assert seconds(sum(map(np.count_nonzero, full))) == 30e-3
    found = select_for_slos(policy, step, [], seconds, needs)
    assert seconds(sum(map(np.count_nonzero, found))) == 12e-3
    # One that is late in any case, however, gets its nodes, and then the others need some for the longer step too.
    late = select_for_slos(policy, step, [], seconds, lambda t: [9.0, 9.0, 9.0, *needs(t)[3:]])
    assert [np.count_nonzero(mask) for mask in late[:3]] == [4, 4, 4]
    assert all(mask.any() for mask in late)


@pytest.mark.parametrize(
    ("policy", "slo", "decoding", "limit"),
    [
        (AdaServe(16, prompts_in_budget=True), True, 4, 21),  # three quarters of 32 - 4
        (AdaServe(16, prompts_in_budget=True), True, 30, 8),  # but at least a quarter of 32
        (AdaServe(16, prompts_in_budget=True), False, 4, None),
        (AdaServe(16, prompts_in_budget=True), True, 0, None),
        (AdaServe(16), True, 4, None),
        (GlobalGreedy(prompts_in_budget=True), False, 4, 21),
        (GlobalGreedy(9, prompts_in_budget=True), False, 4, None),
        (Chain(4), True, 4, None),
    ],
)  # fmt: skip
def test_prompts_are_computed_within_the_verify_budget(
    policy: TreePolicy, slo: bool, decoding: int, limit: int | None
) -> None:
    """A chunk longer than the budget leaves no drafts for those that decode, and makes their step long."""
    run = Steps(seqs=40, tokens=256)
    for i in range(decoding):
        run.add(str(i), slo=Slo(0.1) if slo else Slo())
    run.step()
    run.add("prompt", prompt=200)
    speculator = Speculator([Fake("a", 100, 1e-6, [])], FLAT, policy, verify_budget=32)
    plan = run.scheduler.plan(run.now, speculator.lookahead(run.scheduler.running, run.now))
    assert [s.count for s in plan.scheduled if s.request.id == "prompt"] == [200 if limit is None else limit]


@pytest.mark.parametrize(("longer", "limited"), [(1.7, True), (1.8, False)])
def test_prompts_keep_to_the_verify_budget_only_where_it_is_nearly_free(longer: float, limited: bool) -> None:
    """On a CPU every token lengthens the step: small chunks would make prompts wait, and no request would gain."""
    times = StepTimes({1: 10e-3, 32: longer * 10e-3, 256: 80e-3})
    speculator = Speculator([Fake("a", 100, 1e-6, [])], times, GlobalGreedy(prompts_in_budget=True), verify_budget=32)
    assert speculator.lookahead(requests(4), 0.0).prompt_tokens == (21 if limited else None)


def test_a_pace_limits_prompts_itself() -> None:
    run = Steps(seqs=4, tokens=256)
    run.add("0", slo=Slo(0.1))
    run.step()
    run.add("prompt", prompt=200)
    for throttles, count in ((True, 200), (False, 5)):
        run.scheduler.pace.throttles = throttles
        plan = run.scheduler.plan(run.now, Lookahead(prompt_tokens=5))
        assert [s.count for s in plan.scheduled] == [1, count]
        run.answer(plan)
        run.scheduler.cancel("prompt", run.now)
        run.add("prompt", prompt=200)


def test_while_prompts_fill_the_budget_only_late_requests_draft_and_only_where_it_is_economic() -> None:
    """The step is long anyway, so a few nodes cost little; the policy of the paper drafts for no request then."""
    times = StepTimes({n: max(10e-3, n * 0.3e-3) for n in range(1, 513)})
    running = [with_slo(0, 0.2), with_slo(1, 20e-3), with_slo(2, 20e-3), with_slo(3, None)]
    for policy, expected in ((AdaServe(16, times), ["1", "2"]), (AdaServe(16), [])):
        speculator = Speculator([Fake("a", 100, 1e-4, list("0123"))], times, policy, verify_budget=32)
        ahead = speculator.lookahead(running, 0.0)
        scheduled = [ScheduledRequest(r, 7, 1, ahead.drafts, ahead.levels) for r in running]
        drafts = speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(300, 99, 4), 0.0)
        assert sorted(drafts) == expected
        assert sum(map(len, drafts.values())) <= 32 - 4


def late_plan(requests: int, late: int, policy: TreePolicy, budget: int = 96) -> tuple[list[int], int]:
    """A step of 64 logit rows in which all decode and the last `late` ones are late for their TPOT.

    Returns the number of draft nodes of each request, and how many the plan has room for.
    """
    run = Steps(seqs=requests, tokens=256)
    for i in range(requests):
        run.add(str(i), slo=Slo(1e-3) if i >= requests - late else Slo())
    run.step()
    drafter = Fake("only", 100, 1e-4, [str(i) for i in range(requests)])
    speculator = Speculator([drafter], STEP, policy, verify_budget=budget)
    lookahead = speculator.lookahead(run.scheduler.running, run.now + 1.0)
    plan = run.scheduler.plan(run.now, lookahead)
    drafts = speculator.draft(plan.scheduled, lambda _: SamplingInputs(), DraftRoom.of(plan), run.now + 1.0)
    run.answer(plan)
    return [len(drafts.get(str(i), ())) for i in range(requests)], plan.draft_nodes


@pytest.mark.parametrize(("requests", "room"), [(4, 60), (8, 56), (32, 32), (40, 24)])
def test_late_requests_get_the_nodes_they_need_however_many_others_decode(requests: int, room: int) -> None:
    """The logit rows that are left go to nodes by value, not evenly to all requests first."""
    nodes, most = late_plan(requests, 2, AdaServe(16))
    assert most == room and sum(nodes) <= room
    depth = min(8, -(-96 // requests))
    assert nodes[-2:] == [depth, depth]


def test_policies_that_do_not_rank_requests_share_the_nodes_evenly() -> None:
    nodes, room = late_plan(32, 2, Chain(8))
    assert (nodes, room) == ([1] * 32, 32)
    nodes, room = late_plan(40, 2, Chain(8))
    assert sum(nodes) == room == 24 and max(nodes) == 1


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(-3, 60))
def test_even_shares(wanted: list[int], nodes: int) -> None:
    shares = even_shares(wanted, nodes)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(sum(wanted), max(nodes, 0)), "nothing is left that someone wants"
    held_back = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert max(shares, default=0) <= min(held_back, default=9) + 1


def test_requests_without_candidates_leave_their_share_to_the_others() -> None:
    free = Fake("free", 100, 0.0, ["0", "1"])  # levels cost nothing, so the round is as deep as it can be
    speculator = Speculator([free], STEP, Chain(8))
    running = requests(8)
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running]
    drafts = speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(8, 13, 8), 0.0)
    assert [len(draft) for draft in drafts.values()] == [6, 7]


def test_a_policy_that_selects_more_than_fits_is_reported() -> None:
    class Greedy(Chain):
        shares_room = True

    speculator = Speculator([Fake("a", 100, 1e-6, list("0123"))], STEP, Greedy(8))
    running = requests(4)
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running]
    with pytest.raises(ValueError, match=r"Greedy selected .* and 9 in all"):
        speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(4, 9, 4), 0.0)


def test_sampled_trees_are_drafted_only_where_they_pay_if_the_policy_is_adaptive() -> None:
    """Steps whose time grows with every token: thirty-two requests fill them."""
    slope = StepTimes({n: 1e-3 * n for n in range(1, 400)})
    drafter = Fake("only", 100, 1e-3, [str(i) for i in range(32)])
    adaptive, always = (Speculator([drafter], slope, SampledTree(8, varies)) for varies in (True, False))
    assert adaptive.lookahead(requests(32), 0.0).levels == 0
    assert always.lookahead(requests(32), 0.0).levels == 8
    config = EngineConfig(acceptance="rejection", draft=["ngram"])
    assert build_speculator(config, [drafter], slope, sampled=True).policy.adaptive
