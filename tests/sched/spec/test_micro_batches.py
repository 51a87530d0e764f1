"""Micro-batches: when they pay, and that no request gets lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.fake_drafter import Fake
from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.micro_batches import (
    MAX_MICRO_BATCHES,
    DrafterLoad,
    Timeline,
    best,
    seconds,
    shares,
    split,
    turns_pay,
)
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.policy import TreePolicy
from jaxspec.sched.timing import StepTimes


def linear(each: float, fixed: float = 0.0):
    return lambda n, context=0.0: fixed + each * n


def test_the_time_line() -> None:
    line = Timeline()
    line.add([2.0, 3.0], [], 5.0)  # drafted at 3, verified at 8
    line.add([4.0], [], 5.0)  # drafted at 7 meanwhile, verified at 13
    assert (line.drafted, line.verified) == (7.0, 13.0)
    line.add([], [1.0], 5.0)  # on the target's device: each waits for the other
    assert (line.drafted, line.verified) == (14.0, 19.0)
    line.add([1.0], [], 0.0)
    assert (line.drafted, line.verified) == (15.0, 19.0)


def test_halves_overlap_where_drafter_and_target_have_their_own_devices() -> None:
    """Drafting takes 8 and verifying 8 seconds, nothing is fixed: 16 in one piece, 12 in two, 10 in four."""
    own_device = [DrafterLoad(8, linear(1.0), 1.0, True)]
    took = [seconds(parts, own_device, 0, linear(0.5)) for parts in range(1, 9)]
    assert [took[0], took[1], took[3], took[7]] == [16.0, 12.0, 10.0, 9.0]
    assert all(b <= a for a, b in pairwise(took))
    assert took[3] == took[4] and best(own_device, 0, linear(0.5)) == 8  # five parts cannot be of equal size
    # The fixed cost of every part limits their number.
    assert best(own_device, 0, linear(0.5, 1.5)) == 2
    assert best(own_device, 0, linear(0.5, 9.0)) == 1
    # Two drafters draft at once, and the slower one is what is waited for.
    both = [*own_device, DrafterLoad(4, linear(3.0), 1.0, True)]
    assert seconds(1, both, 0, linear(0.5)) == 12 + 12


def test_the_heuristic_goes_on_until_a_significant_drop() -> None:
    """SPIN §V-B: a number of parts that is a little worse does not end the search, one that is much worse does."""
    own_device = [DrafterLoad(12, linear(0.2), 1.0, True)]
    times = StepTimes({4: 1.0, 8: 2.0, 12: 3.2, 16: 4.0, 24: 5.0}).of
    took = [seconds(parts, own_device, 0, times) for parts in (1, 2, 3, 4)]
    assert took == pytest.approx([7.4, 7.6, 6.8, 8.6])
    assert best(own_device, 0, times) == 3

    own_device = [DrafterLoad(8, linear(1.0), 1.0, True)]
    times = StepTimes({4: 1.0, 8: 9.0, 16: 10.0}).of  # each half takes nearly as long as the whole
    took = [seconds(parts, own_device, 0, times) for parts in (1, 2, 3, 4)]
    assert took == pytest.approx([18.0, 22.0, 22.0, 9.0])
    assert best(own_device, 0, times) == 1


def test_on_one_device_nothing_is_gained() -> None:
    shared = [DrafterLoad(8, linear(1.0), 1.0, False)]
    compiled = StepTimes({8: 1.0, 64: 10.0}).of  # two steps of 8 tokens would be shorter than one of 16
    for step in (linear(0.5), linear(0.5, 1.0), compiled):
        assert best(shared, 0, step) == 1
    assert seconds(1, shared, 3, linear(0.5)) == 8 + 9.5


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0, 3), st.floats(0, 8), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 30), st.floats(0.01, 5), st.floats(0, 5),
)  # fmt: skip
def test_the_heuristic_never_takes_a_worse_cut_than_none(
    given_: list[tuple[int, float, float, bool]], others: int, each: float, fixed: float
) -> None:
    loads = [DrafterLoad(n, linear(cost, 0.1), drafts, own_device) for n, cost, drafts, own_device in given_]
    parts = best(loads, others, linear(each, fixed))
    assert 1 <= parts <= min(MAX_MICRO_BATCHES, max(n for n, *_ in given_))
    assert seconds(parts, loads, others, linear(each, fixed)) <= seconds(1, loads, others, linear(each, fixed))


class Apart(Fake):
    own_device = True


@given(st.integers(0, 12), st.integers(0, 5), st.sampled_from([None, 1, 2, 3, 8]))
def test_every_piece_of_work_is_in_one_micro_batch(drafted: int, plain: int, parts: int | None) -> None:
    running = [Request(str(i), 3, [1, 2, 3, 4], 100, 0.0, computed=3) for i in range(drafted)]
    prompts = [Request(f"p{i}", 3, [1, 2, 3], 100, 0.0) for i in range(plain)]
    drafter = Apart("apart", 100, 4e-3, [r.id for r in running])
    speculator = Speculator([drafter], StepTimes({n: 1e-3 * n for n in range(1, 200)}))
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running] + [
        ScheduledRequest(r, 0, 3) for r in prompts
    ]
    found = split(scheduled, speculator, parts)
    assert sorted(w.request.id for part in found for w in part) == sorted(w.request.id for w in scheduled)
    assert all(found) or not scheduled
    if parts and ahead.levels and drafted:
        assert len(found) == min(parts, drafted)


def prepared(
    drafters: Sequence[Fake],
    count: int,
    policy: TreePolicy | None = None,
    times: StepTimes | None = None,
    budget: int = 16,
) -> tuple[Speculator, list[ScheduledRequest]]:
    """A step in which `count` requests may draft."""
    running = [Request(str(i), 3, [1, 2, 3, 4], 100, 0.0, computed=3) for i in range(count)]
    times = times or StepTimes({n: 1.0 for n in range(1, 200)})
    speculator = Speculator(drafters, times, policy, verify_budget=budget)
    ahead = speculator.lookahead(running, 0.0)
    return speculator, [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running]


@pytest.mark.parametrize(
    ("cost", "times", "pays"),
    [
        (
            4e-3,
            {n: n * 1e-3 for n in (1, 8, 12, 24)},
            True,
        ),  # half of the step takes as long as drafting
        (4e-3, {1: 10e-3, 64: 10e-3}, False),  # two steps take twice as long as one
        (1e-5, {1: 10e-3, 64: 10e-3}, False),  # and there is nothing to hide
        (4e-3, {1: 1e-5, 64: 1e-5}, False),  # nothing to hide it behind
    ],
)
def test_turns_pay_where_drafting_takes_as_long_as_a_step(cost: float, times: dict[int, float], pays: bool) -> None:
    speculator, scheduled = prepared([Apart("far", 100, cost, list("01234567"))], 8, GlobalGreedy(), StepTimes(times))
    for _ in range(20):  # the usual time of a round is known
        speculator.controllers[0].count_round(True)
    assert turns_pay(scheduled, speculator) == pays


def test_turns_need_two_requests_and_a_drafter_elsewhere() -> None:
    times = StepTimes({1: 10e-3, 64: 10e-3})
    far, near = Apart("far", 100, 4e-3, ["0"]), Fake("near", 100, 4e-3, list("01234567"))
    speculator, scheduled = prepared([far], 1, GlobalGreedy(), times)
    assert not turns_pay(scheduled, speculator)
    speculator, scheduled = prepared([near], 8, GlobalGreedy(), times)
    assert not turns_pay(scheduled, speculator)


@pytest.mark.parametrize("parts", [None, 3])
def test_without_a_drafter_on_its_own_device_a_step_is_not_split(parts: int | None) -> None:
    """Even if two steps of a smaller compiled size would take less time than one."""
    near = Fake("near", 100, 1e-3, list("01234567"))
    speculator, scheduled = prepared([near], 8, GlobalGreedy(), StepTimes({8: 1e-3, 32: 1.0, 64: 2.0}), 64)
    assert len(split(scheduled, speculator, parts)) == 1


def test_requests_of_a_drafter_on_the_targets_device_stay_together() -> None:
    far, near = Apart("far", 100, 1e-6, list("0123")), Fake("near", 200, 1e-3, list("4567"))
    speculator, scheduled = prepared([far, near], 8, GlobalGreedy())
    speculator.proposals.drafter_of = lambda request, requests: 0 if request.id < "4" else 1  # type: ignore[method-assign]
    found = split(scheduled, speculator, 2)
    assert [[s.request.id for s in part] for part in found] == [list("014567"), list("23")]


def test_single_requests_of_several_drafters_are_spread_over_the_micro_batches() -> None:
    apart = [Apart(f"far {i}", 100 * i, 1e-3, list("0123456")) for i in range(4)]
    speculator, scheduled = prepared(apart, 7, GlobalGreedy())
    of = {"0": 0, "1": 0, "2": 0, "3": 1, "4": 1, "5": 2, "6": 3}
    speculator.proposals.drafter_of = lambda request, requests: of[request.id]  # type: ignore[method-assign]
    found = split(scheduled, speculator, 2)
    assert [[s.request.id for s in part] for part in found] == [list("0136"), list("245")]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5), st.integers(1, 8))
def test_shares_are_even_for_each_drafter_and_together(groups: list[tuple[int, bool]], count: int) -> None:
    found = shares(groups, count)
    own = [sum(n for n, (_, apart) in zip(batch, groups, strict=True) if apart) for batch in found]
    assert max(own) - min(own) <= 1
    for (requests, apart), sizes in zip(groups, zip(*found, strict=True), strict=True):
        assert sum(sizes) == requests
        assert max(sizes) - min(sizes) <= 1 if apart else sizes == (requests, *[0] * (count - 1))


@pytest.mark.parametrize("nodes", [None, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_micro_batches_share_the_verify_budget(parts: int, nodes: int | None) -> None:
    """Eight requests and their drafts: at most 16 tokens, or 8 draft nodes, in all micro-batches together."""
    speculator, scheduled = prepared([Apart("far", 100, 1e-3, list("01234567"))], 8, GlobalGreedy(nodes))
    batches = split(scheduled, speculator, parts)
    assert len(batches) == parts
    room = DraftRoom.of(Plan(tuple(scheduled), draft_nodes=99))
    drafts = [speculator.draft(batch, lambda _: None, room, 0.0) for batch in batches]
    sizes = [sum(map(len, part.values())) for part in drafts]
    assert sum(sizes) == 8 and all(sizes), "the budget is used, and by all"


def test_each_micro_batch_reads_the_positions_of_its_own_requests() -> None:
    far, near = DrafterLoad(6, linear(0.0), 1.0, True, context=100.0), DrafterLoad(2, linear(0.0), 1.0, False, 30.0)
    for parts in (1, 2, 3):
        step = Mock(return_value=1.0)
        seconds(parts, [far, near], 4, step, 7.0)
        read = [call.args[1] for call in step.call_args_list]
        assert sum(read) == 6 * 100 + 2 * 30 + 7 and read[0] == 600 / parts + 60 + 7
