"""Waiting requests by the time their wait began, also where that was elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.sched import PagePool, PolicyConfig, Request, Scheduler, SchedulerConfig
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.slo import Slo
from jaxspec.sched.waiting_queue import WaitTimes

waits = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 0, 3, 9, 40]), st.booleans()), max_size=30)


@given(waits)
def test_the_longest_wait_is_first(events: list[tuple[int, int, bool]]) -> None:
    """Each event: seconds that pass, seconds waited elsewhere, and whether the first one then ends."""
    times, now, known = WaitTimes(), 0, dict[str, float]()
    overdue: set[str] = set()
    for i, (passed, waited, ends) in enumerate(events):
        now += passed
        times.begin(Request(str(i), 1, [0], 5, 0.0), now - waited)
        known[str(i)] = now - waited
        found = {request.id for request in times.overdue(10, now)}
        assert found == {name for name, since in known.items() if now >= since + 10} - overdue
        overdue |= found
        if ends:
            _, first = next(iter(times))
            times.end(first)
            del known[first.id]
            overdue.discard(first.id)
        young = [since for since, request in times if request.id not in overdue]
        assert young == sorted(young) and {request.id for _, request in times} == known.keys()


hurries = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 4.0, 10.0, 80.0]), st.booleans()), max_size=30)


@given(hurries)
def test_half_of_a_ttft_slo_is_long_enough(events: list[tuple[int, float | None, bool]]) -> None:
    """Each event: seconds that pass, the TTFT of a new request, and whether the one with the longest wait then ends."""
    times, now, told = WaitTimes(), 0.0, set[str]()
    here: dict[str, Request] = {}
    for i, (passed, ttft, ends) in enumerate(events):
        now += passed
        here[str(i)] = request = Request(str(i), 1, [0], 5, now, slo=Slo(None, ttft))
        times.begin(request, now)
        told |= {request.id for request in times.overdue(15, now)}
        ages = {name: (now - r.arrival, r.slo.ttft) for name, r in here.items()}
        assert told & here.keys() == {
            name for name, (age, slo) in ages.items() if age >= 15 or (slo is not None and age >= slo / 2)
        }
        if ends:
            _, first = next(iter(times))
            times.end(first)
            del here[first.id]
            first.tokens.append(1)
            times.begin(first, now - 14)  # paused, with output: its TTFT no longer counts
            assert not any(request is first for request in times.overdue(15, now))
            times.end(first)


def test_a_request_that_would_miss_its_ttft_goes_before_shorter_ones() -> None:
    def second(ttft: float | None, waited: float = 0.0) -> str:
        policy = PolicyConfig.model_validate({"order": "sjf", "predictor": "oracle", "aging_ms": 10_000})
        scheduler = Scheduler(SchedulerConfig(1, 8, 64, None, 8, policy), PagePool(32, 4))
        scheduler.add(Request("running", 1, [0], 4, 0.0, true_len=4), 0.0)
        plan, now = scheduler.plan(0.0), 0.0
        scheduler.add(Request("long", 1, [0], 50, 0.0, true_len=50, slo=Slo(None, ttft), waited=waited), 0.0)
        scheduler.add(Request("short", 1, [0], 5, 0.0, true_len=2), 0.0)
        while plan.scheduled[0].request.id == "running":
            now += 1
            done = plan.scheduled[0].request.output_len == 3
            scheduler.update(plan, [RequestResult((7,), "length" if done else None)], now)
            plan = scheduler.plan(now)
        return plan.scheduled[0].request.id

    assert [second(ttft) for ttft in (None, 100.0, 10.0, 8.0)] == ["short", "short", "short", "long"]
    assert second(10.0, waited=2.0) == "long"  # elsewhere


def test_a_wait_elsewhere_counts_for_aging() -> None:
    policy = PolicyConfig.model_validate({"order": "sjf", "predictor": "oracle", "aging_ms": 10_000})
    scheduler = Scheduler(SchedulerConfig(1, 8, 64, None, 8, policy), PagePool(32, 4))
    scheduler.add(Request("running", 1, [0], 5, 0.0, true_len=5), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.add(Request("short", 1, [0], 5, 1.0, true_len=2), 1.0)
    scheduler.add(Request("long", 1, [0], 50, 1.0, true_len=50, waited=9.5), 1.0)
    now = 1.0
    while plan.scheduled[0].request.id == "running":
        now += 1
        done = plan.scheduled[0].request.output_len == 4
        scheduler.update(plan, [RequestResult((7,), "length" if done else None)], now)
        plan = scheduler.plan(now)
    assert plan.scheduled[0].request.id == "long"
