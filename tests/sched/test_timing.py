"""Time estimates that learn from what was observed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

from jaxspec.sched.timing import DraftRoundTimes, StepTimes


def rounds() -> DraftRoundTimes:
    return DraftRoundTimes(lambda requests, uncached, levels, width: 1e-3 * (requests + levels))


def test_draft_rounds_are_as_profiled_until_observed_and_then_as_observed() -> None:
    times = rounds()
    assert times.of(2, 8, 3, 1) == pytest.approx(5e-3)
    for _ in range(200):
        times.observe(2, 8, 3, 1, 10e-3)
    assert times.of(2, 8, 3, 1) == pytest.approx(10e-3, rel=0.01)
    assert times.of(7, 9, 3, 4) == pytest.approx(20e-3, rel=0.01), "the deviation is that of all rounds"


def test_an_upper_bound_of_a_draft_round_only_lowers_its_estimate() -> None:
    times = rounds()
    times.observe(2, 8, 3, 1, 50e-3, at_most=True)
    assert times.of(2, 8, 3, 1) == pytest.approx(5e-3)
    times.observe(2, 8, 3, 1, 1e-3, at_most=True)
    assert times.of(2, 8, 3, 1) < 5e-3


def test_a_pause_of_the_machine_counts_as_twice_the_expected_time() -> None:
    paused, slow = rounds(), rounds()
    paused.observe(1, 1, 1, 1, 5.0)
    slow.observe(1, 1, 1, 1, 4e-3)
    assert paused.of(1, 1, 1, 1) == slow.of(1, 1, 1, 1)


# -- the step's time by tokens and committed positions -----------------------------------------------------------------


def roofline(position: float = 34e-9, every: int = 1) -> StepTimes:
    """A device that reads its weights in 4 ms, and computes a token in 30 µs. `every`: from one bucket to the next."""
    return StepTimes({n: max(4e-3, 30e-6 * n) for n in (1, *range(every, 1025, every))}, position)


@given(st.integers(1, 2000), st.integers(0, 10**6), st.floats(0, 1e-6))
def test_committed_positions_add_to_a_step_of_any_size(tokens: int, context: int, position: float) -> None:
    times = roofline(position)
    assert times.of(tokens, context) == pytest.approx(times.of(tokens) + position * context)
    sizes, contexts = np.asarray([1, tokens]), np.asarray([0, context])
    assert times.of_each(sizes, contexts).tolist() == pytest.approx([times.of(1), times.of(tokens, context)])
    seconds = times.of(tokens, context)
    assert times.within(0.99 * seconds, context) < tokens
    if tokens <= 1024:
        assert times.within(1.01 * seconds, context) >= tokens


@given(st.lists(st.floats(0.01, 1), max_size=40), st.integers(1, 200), st.lists(st.integers(0, 10**6), min_size=2))
def test_a_longer_context_never_makes_fewer_drafts_pay(chances: list[float], tokens: int, contexts: list[int]) -> None:
    times, falling = roofline(), np.asarray(sorted(chances, reverse=True))
    counts = [times.best_node_count(falling, tokens, tokens, context) for context in sorted(contexts)]
    assert counts == sorted(counts)
    speeds = [(tokens + falling[:m].sum()) / times.of(tokens + m, contexts[0]) for m in range(len(falling) + 1)]
    best = times.best_node_count(falling, tokens, tokens, contexts[0])
    assert speeds[best] == pytest.approx(max(speeds))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 8e-6))
def test_the_verify_budget_keeps_to_its_factor_at_every_context(context: int, more: int, token: float) -> None:
    """Of a roofline it stays at the ridge; where each token takes time, a longer context leaves room for more."""
    ridge = StepTimes({n: max(4e-3, 31.25e-6 * n) for n in (1, 16, 64, 128, 256, 1024)}, 34e-9)
    assert ridge.verify_budget() == ridge.verify_budget(context) == 128
    slope = StepTimes({n: 4e-3 + token * n for n in range(1, 1025)}, 34e-9)
    budget, factor = slope.verify_budget(context), slope.of(slope.verify_budget()) / slope.of(1)
    assert slope.verify_budget() <= budget <= slope.verify_budget(context + more)
    assert slope.of(budget, context) <= factor * slope.of(1, context) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(0.6, 1.6), st.floats(0.4, 2.5), st.integers(0, 2**32))
def test_steps_correct_both_the_sizes_and_the_positions(size: float, position: float, seed: int) -> None:
    rng, times, true = np.random.default_rng(seed), roofline(34e-9 * position, 8), roofline(every=8)
    for _ in range(3000):
        tokens, context = int(rng.integers(1, 300)), int(rng.integers(0, 500_000))
        times.observe(tokens, size * true.of(tokens) + 34e-9 * context, context)
    assert times.position == pytest.approx(34e-9, rel=0.1)
    assert times.of(100) == pytest.approx(size * true.of(100), rel=0.1)


def test_steps_without_a_context_say_nothing_about_positions() -> None:
    times = roofline()
    for _ in range(100):
        times.observe(1, 8e-3)
    assert times.position == 34e-9 and times.of(1) == pytest.approx(8e-3, rel=0.02)
    times.learn({n: 1e-3 for n in times.sizes})
    assert times.position == 34e-9
    times.learn({1: 1e-3}, 1e-9)
    assert times.of(1, 1000) == pytest.approx(1.001e-3)


@given(st.lists(st.floats(0.1, 2), min_size=1, max_size=12))
def test_noise_that_makes_larger_steps_faster_is_averaged_out(seconds: list[float]) -> None:
    """As an isotonic regression does. All sizes count alike until some of them have run."""
    times = StepTimes({i + 1: s for i, s in enumerate(seconds)})
    found = [times.of(i + 1) for i in range(len(seconds))]
    assert found == sorted(found)
    assert found == pytest.approx(isotonic_regression(seconds).x.tolist())


def test_a_step_that_runs_corrects_a_smaller_one_that_was_profiled_too_long() -> None:
    """Two tokens were measured in a bad moment and have not run since: they take no longer than four do."""
    times = StepTimes({1: 10e-3, 2: 20e-3, 4: 16e-3, 8: 25e-3})
    for _ in range(100):
        times.observe(1, 10e-3)
        times.observe(4, 14e-3)
    assert times.of(1) == pytest.approx(10e-3, rel=0.03)
    assert times.of(2) == pytest.approx(14e-3, rel=0.05) == times.of(4)
