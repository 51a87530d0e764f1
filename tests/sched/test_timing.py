"""Time estimates that learn from what was observed."""

from __future__ import annotations

import pytest

from jaxspec.sched.timing import DraftRoundTimes


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
