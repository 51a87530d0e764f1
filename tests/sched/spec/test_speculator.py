"""Several drafters side by side: who drafts for whom."""

from __future__ import annotations

from weakref import ref

import pytest

from helpers.fake_drafter import STEP, Fake, requests, round_of
from jaxspec.config import EngineConfig
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.adaserve import AdaServe
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.sampled import SampledTree
from jaxspec.sched.timing import StepTimes
from jaxspec.step.packing import SamplingInputs


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
    assert speculator._preferences(running[0], 1) == [1, 0]
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
    assert speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(16, 2), 0.0) == {} and not asked
    assert speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom(15, 2), 0.0) and asked


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
    return sorted(speculator.draft(scheduled, lambda _: SamplingInputs(), DraftRoom.of(Plan(tuple(scheduled))), 0.0))


def test_where_drafts_do_not_pay_only_requests_late_for_their_slo_get_some() -> None:
    """Twelve requests: with drafts for all, a step would take more than twice as long."""
    crowd = [with_slo(i, 0.1) for i in range(11)]
    assert len(drafted_for([with_slo(0, None), with_slo(1, None)], 1e-4)) == 2  # where they pay, all do
    assert drafted_for([*crowd, with_slo(15, 0.1)], 3e-3) == []
    assert drafted_for([*crowd, with_slo(15, 0.009)], 3e-3) == ["15"]
    assert drafted_for([*crowd, with_slo(15, 0.009, ahead=1.0)], 3e-3) == []


def test_the_shape_follows_the_budget() -> None:
    """AdaServe's Eq. 8 and 9: ceil(B / n) levels, as wide as floor(B / n) allows; nothing where n fill the budget."""
    running = [with_slo(i, 0.009) for i in range(8)]
    drafter = Fake("only", 100, 1e-4, list("01234567"))
    speculator = Speculator([drafter], STEP, AdaServe(16, calibrated=True), verify_budget=8)
    assert speculator.lookahead(running, 0.0).levels == 0
    assert speculator.lookahead(running[:3], 0.0).levels == 3
    assert speculator.lookahead(running[:1], 0.0).levels == 8


def test_sampled_trees_are_drafted_only_where_they_pay_if_the_policy_is_adaptive() -> None:
    """Steps whose time grows with every token: thirty-two requests fill them."""
    slope = StepTimes({n: 1e-3 * n for n in range(1, 400)})
    drafter = Fake("only", 100, 1e-3, [str(i) for i in range(32)])
    adaptive, always = (Speculator([drafter], slope, SampledTree(8, varies)) for varies in (True, False))
    assert adaptive.lookahead(requests(32), 0.0).levels == 0
    assert always.lookahead(requests(32), 0.0).levels == 8
    config = EngineConfig(acceptance="rejection", draft=["ngram"])
    assert build_speculator(config, [drafter], slope, sampled=True).policy.adaptive
