"""Orders on predicted lengths and their distribution: SRPT, Gittins and Boost, and the theorems that they follow."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.steps import Steps
from jaxspec.sched import Request, RequestResult, RequestStatus
from jaxspec.sched.length.distribution import _AGAIN, _MEMORY, LengthDistribution
from jaxspec.sched.order.boost import Boost
from jaxspec.sched.order.gittins import Gittins, GittinsSettings, _Table
from jaxspec.sched.order.srpt import Srpt
from jaxspec.sched.timing import ResponseTimes, Runtime


def request(predicted: float | None = None, output: int = 0, prompt: int = 1, arrival: float = 0.0) -> Request:
    return Request(
        f"{predicted} {output}", prompt, [0] * (prompt + output), 10_000, arrival, predicted_len=predicted,
        first_prediction=predicted, computed=prompt + output - 1,
    )  # fmt: skip


def gittins(ratios: list[float], predicted: bool, quantum: int = 1, **settings: float) -> Gittins:
    """With lengths (relative to the prediction, or in tokens) that are distributed like these."""
    lengths = LengthDistribution()
    distribution = lengths._predicted if predicted else lengths._unpredicted
    for i in range(_MEMORY):
        distribution.observe(ratios[i % len(ratios)], True)
    return Gittins(GittinsSettings.model_validate({"quantum": quantum, "reluctance": 0.1, **settings}), lengths, 0.0)


# -- theorems of the Gittins index


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.99)), min_size=2, max_size=8))
def test_with_exact_predictions_it_is_srpt(several: list[tuple[int, float]]) -> None:
    order = gittins([1.0], True)
    for predicted, share in several:
        r = request(float(predicted), int(share * predicted))
        assert order.key(r) == pytest.approx(predicted - r.output_len)


def test_a_prediction_while_generating_counts_from_where_it_was_made() -> None:
    order = gittins([1.0], True, quantum=4)
    for _ in range(_AGAIN * _MEMORY):
        order._lengths._repredicted.observe(2.0, True)
    r = request(100.0, 30)
    assert order.key(r) == pytest.approx(72)  # in whole quanta
    r.repredicted.append((30, 50.0))
    assert order.key(r) == pytest.approx(100), "twice what it said"
    r.tokens += [0] * 10
    r.computed += 10
    assert order.key(r) == pytest.approx(90)


def test_without_predictions_and_with_a_falling_hazard_rate_it_is_las() -> None:
    """Pareto lengths: the longer an answer is already, the longer it goes on."""
    order = gittins([10 * (1 - (i + 0.5) / _MEMORY) ** (-1 / 1.5) for i in range(_MEMORY)], False)
    ranks = [order.key(request(None, output)) for output in range(10, 150, 10)]
    assert all(a <= b for a, b in pairwise(ranks)) and ranks[-1] > 5 * ranks[0]


def test_with_a_growing_hazard_rate_it_does_not_preempt() -> None:
    """Uniform lengths: what has begun is nearer to its end, so first come, first served."""
    order = gittins([float(n) for n in range(1, 201)], False)
    ranks = [order.key(request(None, output)) for output in range(0, 190, 10)]
    assert all(a > b for a, b in pairwise(ranks))


def test_without_a_memory_all_are_equal() -> None:
    """Exponential lengths: the hazard rate is constant, and so is the rank."""
    n = _MEMORY
    order = gittins([-100 * log((i + 0.5) / n) for i in range(n)], False)
    ranks = [order.key(request(None, output)) for output in (0, 50, 100, 150)]
    assert max(ranks) < 1.15 * min(ranks)


def test_the_rank_is_the_smallest_ratio_over_all_stopping_times() -> None:
    ratios = [0.25, 0.5, 0.5, 1.0, 3.0]
    order = gittins(ratios, True)
    table = _Table.of(order._lengths._predicted)
    seen = [ratios[i % len(ratios)] for i in range(_MEMORY)]
    for age in (0.0, 0.25, 0.4, 0.5, 1.0, 2.0):
        left = [r - age for r in seen if r > age]
        wanted = min(
            (7.0 + 100 * sum(min(x, stop) for x in left) / len(left)) / (sum(x <= stop for x in left) / len(left))
            for stop in set(left)
        )
        assert table.rank(age, 100.0, 7.0) == pytest.approx(wanted, rel=1e-6)
    assert table.rank(3.5, 100.0, 7.0) == pytest.approx(7.0 + 350.0)  # longer than all: as much again


# -- what else a rank depends on


def test_prompts_and_speed_count_as_work() -> None:
    order = gittins([1.0], True)
    order._prompt_token = 0.5
    waiting = request(10.0, prompt=41)
    waiting.computed = 0
    assert order.key(waiting) == pytest.approx(10 + 0.5 * 40)
    fast, slow = request(100.0, 10), request(100.0, 10)
    for _ in range(40):
        order.observe(fast, RequestResult((1, 2, 3)), 0.1)
        order.observe(slow, RequestResult((1,)), 0.1)
    assert order.key(fast) < 0.6 * order.key(slow)


def test_a_running_request_is_preempted_only_by_a_clearly_better_one() -> None:
    order = gittins([1.0], True, reluctance=0.2)
    running = request(100.0)
    running.status = RequestStatus.RUNNING
    assert order.key(request(70.0)) < order.key(running) < order.key(request(85.0))


def test_a_waiting_request_keeps_its_rank_until_the_distribution_changes() -> None:
    order = gittins([1.0], True)
    r = request(100.0)
    before = order.key(r)
    for _ in range(100):
        order.observe(request(50.0), RequestResult((1, 2, 3)), 0.1)  # the mean speed of all
    assert order.key(r) == before and not list(order.rekeyed())
    for _ in range(40):
        order._lengths._predicted.observe(0.1, True)
    assert order.key(r) == before
    assert list(order.rekeyed()) == [r] and order.key(r) < before
    assert not list(order.rekeyed())


# -- SRPT


def test_srpt_spares_requests_that_are_nearly_done() -> None:
    order = Srpt(0.5)
    assert order.key(request(30.0, 12)) == 18
    assert order.preemptible(request(30.0, 14)) and not order.preemptible(request(30.0, 15))


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_srpt_preempts_because_of_a_doubled_prediction_only_beyond_half(share: float) -> None:
    run = Steps(order="srpt", srpt={"preemptible_share": share})
    run.add("long", predicted_len=10, true_len=30)
    while run.scheduler.num_waiting or run.requests["long"].output_len < 9:
        run.step()
    run.add("short", predicted_len=5, true_len=5)
    first = run.finish()[0]
    assert (first == "short") is (share > 0.5), "at 10 tokens what is left becomes 10, and 5 are fewer"


@pytest.mark.parametrize("order", ["srpt", "gittins"])
def test_shorter_ones_preempt(order: str) -> None:
    run = Steps(order=order, predictor="oracle", gittins={"quantum": 1, "reluctance": 0.1})
    run.scheduler.lengths._predicted._seen.clear()
    for _ in range(32):
        run.scheduler.lengths._predicted.observe(1.0, True)
    run.add("long", true_len=30)
    assert run.step() == ["long"]
    run.add("short", true_len=3)
    run.add("middle", true_len=9)
    assert run.finish() == ["short", "middle", "long"]
    assert run.scheduler.num_pauses == 1


# -- Boost


def test_the_boost_is_the_papers() -> None:
    runtime = Runtime()
    order = Boost(5.0, runtime, ResponseTimes(4))
    r = request(20.0, arrival=100.0)
    assert order.key(r) == pytest.approx(100 + 5 * log(1 - exp(-runtime.remaining(r) / 5)))


def test_short_requests_overtake_long_ones_within_a_bounded_time() -> None:
    order = Boost(10.0, Runtime(), ResponseTimes(4))
    long, short, later = request(800.0), request(10.0, arrival=5.0), request(10.0, arrival=60.0)
    assert order.key(short) < order.key(long) < order.key(later)


def test_a_waiting_request_keeps_its_boost_while_the_model_learns() -> None:
    runtime = Runtime()
    order, r = Boost(10.0, runtime, ResponseTimes(4)), request(50.0)
    before = order.key(r)
    runtime.d *= 3
    assert order.key(r) == before
    r.predicted_len = 5.0
    assert order.key(r) != before


def test_boosts_follow_the_response_times() -> None:
    """Those that first come, first served would have: with four slots, half a queue of eight runs before the last."""
    responses = ResponseTimes(4)
    order, exact = Boost(None, Runtime(), responses), Boost(0.9 * 40, Runtime(), responses)
    responses.ended(20.0)
    responses.arrived(4)
    assert responses.mean == pytest.approx(40)
    assert order.key(request(10.0)) == pytest.approx(exact.key(request(10.0)))
    responses.arrived(8)
    assert responses.mean == pytest.approx(50), "the mean of 40 and 60"
    for _ in range(5000):
        responses.ended(1.0)
        responses.arrived(0)
    assert responses.mean == pytest.approx(1.0, abs=0.1)


def test_response_times_are_forecast_as_requests_arrive() -> None:
    run = Steps(order="boost", predictor="oracle")
    run.add("a", true_len=3)
    run.finish()
    times = run.scheduler._responses
    begun = run.requests["a"].first_scheduled
    assert begun is not None
    ran = run.now - begun
    run.add("b", true_len=3)
    assert times.mean == pytest.approx((10 + ran) / 2, abs=0.1), "what was known at each arrival"
