"""The rules of each order, of length predictions and of aging. LAPS-SD has tests of its own."""

from __future__ import annotations

from math import log
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest

from helpers.steps import Steps
from jaxspec.sched import Request, RequestStatus
from jaxspec.sched.length import corrected
from jaxspec.sched.length.oracle import NoisyOracle
from jaxspec.sched.order.pairwise import OracleComparator
from jaxspec.sched.waiting_queue import IndexedHeap


def ended(**policy: Any) -> list[str]:
    """Requests of 5, 3, 5, 3 and 1 tokens, one at a time; -> in which order they end."""
    run = Steps(seqs=1, **policy)
    for name, length in zip("abcde", (5, 3, 5, 3, 1), strict=True):
        run.add(name, true_len=length)
    return run.finish()


def test_first_come_first_served():
    assert "".join(ended()) == "abcde"


def test_the_shortest_goes_first_and_ties_in_order_of_arrival():
    assert "".join(ended(order="sjf", predictor="oracle")) == "ebdac"


def test_comparing_two_at_a_time_sorts_as_well_as_lengths_do():
    assert "".join(ended(order="pairwise")) == "ebdac"
    assert "".join(ended(order="pairwise", pairwise={"error_rate": 1.0})) == "cadbe"


def test_a_comparator_is_as_wrong_as_it_says_and_never_contradicts_itself():
    requests = [Request(str(i), 1, [0], i + 1, 0.0, number=i) for i in range(200)]
    shorter = OracleComparator(0.25, seed=3)
    pairs = [(a, b) for a in requests for b in requests if a.number < b.number]
    assert all(shorter(a, b) != shorter(b, a) for a, b in pairs)
    assert fmean(not shorter(a, b) for a, b in pairs) == pytest.approx(0.25, abs=0.02)


def test_without_a_prediction_a_request_counts_as_the_most_it_may_write():
    run = Steps(order="sjf")
    for name, length in (("a", 9), ("b", 4), ("c", 6)):
        run.add(name, max_tokens=length)
    run.requests["a"].true_len = 1
    assert run.finish() == ["b", "c", "a"]


def test_a_shorter_one_that_comes_later_does_not_preempt():
    run = Steps(order="sjf", predictor="oracle")
    run.add("a", 5)
    assert run.step() == ["a"]
    run.add("b", 1)
    assert run.finish() == ["a", "b"] and run.scheduler.num_pauses == 0


def test_a_late_prediction_moves_its_request():
    run = Steps(order="sjf", predictor="oracle")
    run.add("a", 5)
    run.step()
    run.add("b", 30, true_len=30)
    run.add("c", 20, true_len=20)
    assert run.scheduler.predicted("b", 10, run.now) and not run.scheduler.predicted("z", 10, run.now)
    assert [r.id for r in run.scheduler.waiting] == ["b", "c"]
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            run.scheduler.predicted("b", bad, run.now)
    with pytest.raises(ValueError, match="positive"):
        run.add("d", predicted_len=0)


def test_an_outlived_prediction_is_doubled():
    run = Steps()
    request = run.add("a", max_tokens=11, predicted_len=2)
    seen = []
    for _ in range(9):
        run.step()
        seen.append(request.predicted_len)
    assert seen == [2, 4, 4, 8, 8, 8, 8, 11, 11]
    assert run.scheduler.predicted("a", 5, run.now) and request.predicted_len == 10
    assert corrected(3.5, request) == 11  # what the client allows is known, and an answer cannot outlive it


def test_a_noisy_oracle_errs_as_it_says():
    oracle = NoisyOracle(0.4, Random(0))
    requests = [Request(str(i), 1, [0], 10**6, 0.0, true_len=1000) for i in range(2000)]
    logs = [log((oracle.predict(r) or 0) / 1000) for r in requests]
    assert fmean(logs) == pytest.approx(0, abs=0.03) and stdev(logs) == pytest.approx(0.4, abs=0.03)
    short = Request("s", 1, [0], 3, 0.0)
    assert all((oracle.predict(short) or 0) >= 1 for _ in range(50))


def test_a_noisy_oracle_errs_both_ways_even_where_max_tokens_is_the_true_length():
    oracle = NoisyOracle(0.5, Random(1))
    ratios = [(oracle.predict(Request(str(i), 1, [0], 100, 0.0)) or 0) / 100 for i in range(1000)]
    assert fmean(ratio > 1 for ratio in ratios) == pytest.approx(0.5, abs=0.05) and max(ratios) > 2


def test_a_correction_goes_by_max_tokens_and_not_by_the_true_length():
    run = Steps()
    request = run.add("a", max_tokens=64, predicted_len=3, true_len=20)
    seen = set()
    while request.status is RequestStatus.RUNNING or not request.output_len:
        run.step()
        seen.add(request.predicted_len)
    assert seen == {3, 6, 12, 24} and run.done


def test_a_higher_priority_preempts_and_an_equal_one_waits():
    run = Steps(order="priority")
    run.add("a", 4, priority=1)
    assert run.step() == ["a"]
    run.add("tie", 2, priority=1)
    run.add("low", 1, priority=5)
    assert run.step() == ["a"]
    run.add("high", 2, priority=-3)
    plan = run.plan()
    a = run.requests["a"]
    assert plan.paused == (a,) and plan.preempted == () and a.status is RequestStatus.PAUSED and a.pages
    run.answer(plan)
    assert run.finish() == ["high", "a", "tie", "low"]
    assert (a.pauses, a.preemptions, a.recomputed, run.scheduler.num_pauses) == (1, 0, 0, 1)


def test_priorities_that_do_not_preempt():
    run = Steps(order="priority", priority={"preemptive": False})
    run.add("a", 4, priority=1)
    run.step()
    run.add("tie", 2, priority=1)
    run.add("high", 2, priority=-3)
    assert run.finish() == ["a", "high", "tie"] and run.scheduler.num_pauses == 0


def test_least_attained_service_goes_round_by_the_quantum():
    run = Steps(order="las", las={"quantum_ms": 2000})
    for name in "abc":
        run.add(name, 9)
    # The first token is prefill's, no round; then two seconds each. A tie preempts no request: c continues.
    assert run.steps(15) == "a a a b b b c c c c c a a b b"
    run.add("d", 3)
    assert run.steps(4) == "d d d a"


def test_two_slots_go_to_the_two_with_the_least_service():
    run = Steps(seqs=2, order="las", las={"quantum_ms": 1000})
    for name in "abc":
        run.add(name, 20)
    assert run.steps(2) == "ab ab"
    for _ in range(12):
        run.step()
    served = [r.attained for r in run.requests.values()]
    assert max(served) - min(served) <= 2


def test_a_starving_request_is_promoted_and_keeps_its_slot():
    run = Steps(order="sjf", predictor="oracle", aging_ms=20_000)
    run.add("long", 30)
    for i in range(40):
        run.add(f"s{i}", 2)
        run.step()
        run.step()
        if i == 10:
            assert run.now >= 20 and run.requests["long"].output_len > 0
    assert "long" in run.done and run.done["long"] < 20 + 30 + 4


@pytest.mark.parametrize("order", ["las", "priority", "laps_sd"])
def test_without_aging_a_request_may_wait_as_long_as_others_come(order: str):
    for aging in (None, 10_000):
        run = Steps(order=order, aging_ms=aging, las={"quantum_ms": 0}, laps_sd={"first_threshold_ms": 1.0})
        run.add("a", 20, priority=2)
        for i in range(60):
            run.add(f"s{i}", 3, priority=1)
            run.step()
        assert ("a" in run.done) == (aging is not None)
        assert run.finish()


def test_a_line_that_is_moved_about_stays_in_order_and_small():
    keys = {str(i): i for i in range(50)}
    requests = [Request(str(i), 1, [0], 1, 0.0, number=i) for i in range(50)]
    line = IndexedHeap(lambda request: keys[request.id])
    for request in requests:
        line.push(request)
    random = Random(1)
    for _ in range(3000):
        request = random.choice(requests)
        if request in line and random.random() < 0.3:
            line.remove(request)
        else:
            keys[request.id] = random.randint(0, 9)
            line.push(request)
        inside = [r for r in requests if r in line]
        expected = sorted(inside, key=lambda r: (keys[r.id], r.number))
        assert line.first() is (expected[0] if expected else None)
        assert len(line._heap) <= 2 * 50 + 65
    assert list(line) == sorted((r for r in requests if r in line), key=lambda r: (keys[r.id], r.number))
