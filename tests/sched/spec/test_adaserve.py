"""AdaServe's selection against brute force, its paper's example, and what no selection may do."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.candidate_trees import (
    best_by_size,
    check,
    closed,
    forest,
    levels,
    optimal,
    random_candidates,
    select,
    worth,
)
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo, need, slack
from jaxspec.sched.spec.trees.adaserve import AdaServe
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.policy import StepCandidates
from jaxspec.sched.timing import StepTimes

NEEDS = st.one_of(st.just(-inf), st.floats(-5, 9))


def tree(*nodes: tuple[int, float]) -> Candidates:
    """From (parent, path probability)."""
    parent, chance = zip(*nodes, strict=True)
    token = np.arange(len(nodes), dtype=np.int32)
    return Candidates(token, np.asarray(parent, np.int32), np.log(np.asarray(chance, np.float32)))


#: Figure 2: three levels of a beam of two. The values that its text leaves open are in the order that it names.
FIGURE_2 = [
    tree((-1, 0.7), (-1, 0.2), (0, 0.45), (0, 0.1), (2, 0.3), (2, 0.05)),
    tree((-1, 0.5), (-1, 0.4), (0, 0.35), (0, 0.1), (2, 0.25), (2, 0.05)),
]
#: The figure's thresholds of 0.6 and 0.8 leave out the root, which counts 1.
FIGURE_2_NEEDS = [1.6, 1.8]


def test_the_papers_example():
    masks = select(AdaServe(16), FIGURE_2, [6, 6], 8 - 2, FIGURE_2_NEEDS, 2)
    assert [np.flatnonzero(m).tolist() for m in masks] == [[0, 2, 4], [0, 1, 2]]
    exact = optimal(FIGURE_2, 8, FIGURE_2_NEEDS)
    assert exact is not None and all((a == b).all() for a, b in zip(masks, exact, strict=True))


def test_the_hosts_time_counts_unless_slos_need_drafts_anyway():
    times = StepTimes({1: 1.0, 8: 1.0})

    def taken(overhead: float, *needs: float) -> list[int]:
        step = StepCandidates(Forest(FIGURE_2), [6, 6], 10**6, 6, needs, 2, overhead=overhead)
        return [int(mask.sum()) for mask in AdaServe(16, times).select(step)]

    assert taken(0.0, -inf, -inf) == [3, 3]
    assert taken(1.0, -inf, -inf) == [3, 3] and taken(2.0, -inf, -inf) == [0, 0]
    assert taken(2.0, 1.6, -inf) == [3, 3]


def test_who_needs_most_is_served_first():
    """Where the budget is too small for both, descending A decides; without any need, the likeliest nodes do."""
    assert [int(m.sum()) for m in select(AdaServe(16), FIGURE_2, [6, 6], 2, [1.6, 1.8], 2)] == [0, 2]
    assert [int(m.sum()) for m in select(AdaServe(16), FIGURE_2, [6, 6], 2, [-inf, -inf], 2)] == [1, 1]
    assert [int(m.sum()) for m in select(AdaServe(1), FIGURE_2, [6, 6], 2, [1.6, 1.8], 2)] == [1, 1]


def test_a_need_beyond_the_tree_is_capped():
    """A of 99 counts as d + 1: it does not take more than all levels could give."""
    certain = tree((-1, 1.0), (-1, 0.4), (0, 1.0), (0, 0.3))
    masks = select(AdaServe(16), [certain, FIGURE_2[0]], [9, 9], 3, [99.0, -inf], 2)
    assert [np.flatnonzero(m).tolist() for m in masks] == [[0, 2], [0]]


def test_what_makes_a_step_slower_than_it_is_worth_is_left_out():
    """On the plateau all of the budget is used, beyond it nothing that is no one's need."""
    times = StepTimes({2: 1.0, 4: 1.0, 8: 4.0})
    masks = select(AdaServe(16, times), FIGURE_2, [6, 6], 6, [-inf, -inf], 2)
    assert [int(m.sum()) for m in masks] == [1, 1]
    masks = select(AdaServe(16, times), FIGURE_2, [6, 6], 6, [2.4, -inf], 2)
    assert [int(m.sum()) for m in masks] == [3, 5 - 3 + 1]  # once the step is long, the rest comes for nothing


@settings(deadline=None, max_examples=150)
@given(forest(), st.integers(-2, 20), st.data())
def test_selection_keeps_to_trees_and_budget(given_, room, data):
    trees, limits = given_
    needs = [data.draw(NEEDS) for _ in trees]
    most = data.draw(st.integers(0, 8))
    for times in (None, StepTimes({1: 1.0, 8: 1.1, 16: 3.0})):
        masks = check(AdaServe(most, times), trees, limits, room, needs)
        assert sum(int(m.sum()) for m in masks) <= max(room, 0)
    everything = sum(
        min(max(limit, 0), int(np.isfinite(t.logprob).sum())) for t, limit in zip(trees, limits, strict=True)
    )
    masks = select(AdaServe(most), trees, limits, room, needs, len(trees))
    assert sum(int(m.sum()) for m in masks) == min(max(room, 0), everything)


@settings(deadline=None, max_examples=150)
@given(forest(5), st.integers(0, 20), st.data())
def test_the_oracle_is_brute_force(given_, room, data):
    """The most expected tokens under the budget, every need met; None exactly where that is impossible."""
    trees, _ = given_
    needs = [data.draw(st.one_of(st.just(-inf), st.floats(0, 4))) for _ in trees]
    tables = [best_by_size(t, len(t)) for t in trees]
    best = max(
        (
            sum(t[k] for t, k in zip(tables, sizes, strict=True))
            for sizes in product(*(range(len(t)) for t in tables))
            if sum(sizes) + len(trees) <= room
            and all(1 + t[k] >= a for t, k, a in zip(tables, sizes, needs, strict=True))
        ),
        default=None,
    )
    found = optimal(trees, room, needs)
    # Sums of chances that meet a need exactly may fall on either side of it.
    near = any(abs(1 + v - a) < 1e-6 for t, a in zip(tables, needs, strict=True) for v in t)
    if found is None or best is None:
        assert near or (found is None and best is None)
        return
    assert all(closed(t, m) for t, m in zip(trees, found, strict=True))
    assert sum(int(m.sum()) for m in found) + len(trees) <= room
    assert near or sum(worth(t, m) for t, m in zip(trees, found, strict=True)) == pytest.approx(best)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 30), st.data())
def test_it_finds_the_optimum_where_there_is_one(seed, count, room, data):
    """With room for each (n_max), the practical selection is the optimal one whenever all needs can be met."""
    rng = np.random.default_rng(seed)
    trees = [random_candidates(rng, int(rng.integers(1, 12))) for _ in range(count)]
    needs = [data.draw(st.floats(0, 3)) for _ in trees]
    exact = optimal(trees, room, needs)
    if exact is None or any(a > levels(t) + 1 for a, t in zip(needs, trees, strict=True)):
        return
    masks = select(AdaServe(99), trees, [99] * count, room - count, needs, count)
    assert sum(worth(t, m) for t, m in zip(trees, masks, strict=True)) == pytest.approx(
        sum(worth(t, m) for t, m in zip(trees, exact, strict=True))
    )
    free = select(GlobalGreedy(), trees, [99] * count, room - count, needs, count)
    assert sum(map(np.sum, free)) == sum(map(np.sum, masks))


def request(tpot: float | None, output: int, first_token: float | None = 10.0) -> Request:
    return Request("r", 3, [0] * (3 + output), 100, 0.0, slo=Slo(tpot), first_token=first_token)


def test_tokens_that_an_slo_needs_from_a_step():
    """Eq. 5: 0.5 s since the first token and a step of 0.1 s are six tokens at 0.1 s; five came after the first."""
    assert need(request(0.1, 6), 10.5, 0.1) == pytest.approx(1.0)
    assert need(request(0.1, 2), 10.5, 0.1) == pytest.approx(5.0)
    assert need(request(None, 2), 10.5, 0.1) == -inf
    assert need(request(0.1, 0, None), 10.5, 0.1) == -inf
    assert slack(request(0.1, 6), 10.5) == pytest.approx(0.1)
    assert slack(request(None, 6), 10.5) == inf


@pytest.mark.parametrize("field", ["tpot", "ttft"])
@pytest.mark.parametrize("value", [0.0, -1.0, inf, float("nan")])
def test_slos_are_positive(field, value):
    with pytest.raises(ValueError, match=f"slo.{field}_ms"):
        Slo(**{field: value})


def test_the_budget_is_where_memory_and_arithmetic_meet():
    """A device that takes 8 ms for up to 32 tokens and a quarter of one for each beyond: B is 32."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    times = StepTimes({n: max(8e-3, 0.25e-3 * n) for n in sizes})
    assert times.verify_budget() == 32
    assert times.within(8e-3) == 32 and times.within(7.9e-3) == 0 and times.within(1.0) == 256
    for _ in range(200):
        times.observe(16, 16e-3)
    assert times.of(1) == pytest.approx(16e-3, rel=0.01) and times.verify_budget() == 32


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0, 9), st.integers(0, 9), st.integers(0, 2**32))
def test_what_nodes_are_worth(chances, expected, tokens, seed):
    rng = np.random.default_rng(seed)
    times = StepTimes({int(n): float(rng.uniform(0.1, 2)) for n in rng.choice(np.arange(1, 30), 4, replace=False)})
    times.observe(1, 0.7)
    falling = sorted(chances, reverse=True)
    speeds = [(expected + sum(falling[:m])) / times.of(max(tokens + m, 1)) for m in range(len(falling) + 1)]
    found = times.best_node_count(np.asarray(falling), expected, tokens)
    assert speeds[found] == pytest.approx(max(speeds))
    assert all(speed < speeds[found] * (1 + 1e-9) for speed in speeds[found + 1 :])


def test_a_profile_measured_again_is_not_corrected_for_the_old_one():
    times = StepTimes({1: 2.0, 8: 4.0})
    for _ in range(300):
        times.observe(1, 1.0)
    assert times.of(8) == pytest.approx(2.0, rel=0.05)
    times.learn({1: 1.0, 8: 2.0})
    assert (times.of(1), times.of(8)) == (1.0, 2.0)
    for _ in range(300):
        times.observe(1, 1.5)
        times.observe(8, 2.0)
    assert (times.of(1), times.of(8)) == pytest.approx((1.5, 2.0), rel=0.05), "each size has its own correction"
    times.learn({4: 1.2})
    assert (times.of(1), times.of(8)) == pytest.approx((1.5, 2.0), rel=0.05), "a new size leaves them as they are"


def test_step_times_need_a_size():
    for bad in ({}, {0: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="step times"):
            StepTimes(bad)
