"""Properties that hold for every policy under any workload, on a fake device with paged memory."""

from __future__ import annotations

from random import Random
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drive import PREEMPTIVE, TIMES, Drive, policies
from helpers.paged import Device, Job, crowd, jobs
from jaxspec.sched import PagePool, PolicyConfig, Request, Scheduler, SchedulerConfig
from jaxspec.sched.slots import ORDERS, PACES


@st.composite
def schedulers(draw: st.DrawFn, longest: int, policy: PolicyConfig) -> Scheduler:
    """A scheduler with limits from barely enough for one request up to plenty."""
    seqs, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    tokens, slots = seqs + draw(st.integers(0, 20)), seqs + draw(st.integers(0, 8))
    pages = -(-longest // page_size) + draw(st.integers(0, 12))
    config = SchedulerConfig(seqs, tokens, longest, None, slots, policy, times=TIMES)
    return Scheduler(config, PagePool(pages, page_size, draw(st.sampled_from([True, True, False]))))


many = st.lists(jobs, min_size=1, max_size=12)


def drive(data: st.DataObject, jobs: list[Job], seed: int, **fixed: Any) -> Drive:
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    return Drive(data.draw(schedulers(longest, data.draw(policies(**fixed)))), jobs, Random(seed))


@settings(max_examples=400, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_every_request_ends_and_says_what_it_says_alone(data: st.DataObject, jobs: list[Job], seed: int):
    drive(data, jobs, seed).run()


@pytest.mark.parametrize("order", PREEMPTIVE)
@settings(max_examples=100, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_preemption_loses_nothing(order: str, data: st.DataObject, jobs: list[Job], seed: int):
    drive(data, jobs, seed, order=order).run()


@pytest.mark.parametrize("pace", [name for name in PACES.names if PACES[name].throttles])
@settings(max_examples=100, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_throttling_loses_nothing(pace: str, data: st.DataObject, jobs: list[Job], seed: int):
    drive(data, jobs, seed, pace=pace).run()


@settings(max_examples=60, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_the_same_events_lead_to_the_same_decisions(data: st.DataObject, jobs: list[Job], seed: int):
    first = drive(data, jobs, seed)
    config, pool = first.scheduler.config, first.scheduler.pool
    again = Drive(
        Scheduler(config, PagePool(pool.num_pages, pool.page_size, pool.enable_prefix_caching)), jobs, Random(seed)
    )
    first.run()
    again.run()
    assert first.log == again.log


def test_the_properties_meet_switches_and_lost_pages():
    """The workloads above pause requests, and take pages from paused ones: else they would prove little.

    Four of our orders do so often. A new one need not.
    """
    often = [order for order in PREEMPTIVE if min(switches_and_losses(order)) > 20]
    assert len(often) >= 4


def switches_and_losses(order: str) -> tuple[int, int, int]:
    """Pauses, preemptions, and tokens computed again, over twenty runs."""
    pauses = preempted = lost = 0
    for seed in range(20):
        random = Random(seed)
        jobs = crowd(random)
        policy = PolicyConfig.model_validate(
            {
                "order": order,
                "las": {"quantum_ms": 1000},
                "laps_sd": {"first_threshold_ms": 1500, "window": 3},
                "predictor": "noisy_oracle",
                "alise": {"first_threshold_ms": 1500},
            }
        )
        drive = Drive(Scheduler(SchedulerConfig(3, 8, 40, None, 4, policy), PagePool(10, 4)), jobs, random)
        drive.run()
        pauses, preempted = pauses + drive.scheduler.num_pauses, preempted + drive.scheduler.num_preemptions
        lost += drive.scheduler.recomputed_tokens
    return pauses, preempted, lost


@pytest.mark.parametrize("order", ORDERS.names)
def test_with_aging_no_request_starves(order: str):
    """Short requests of high priority come without end; a long one of low priority ends all the same."""
    policy = PolicyConfig.model_validate(
        {"order": order, "predictor": "oracle", "aging_ms": 10_000, "las": {"quantum_ms": 0}}
    )
    scheduler = Scheduler(SchedulerConfig(2, 8, 40, None, 8, policy), PagePool(8, 4))
    long = Request("long", 4, [0, 1, 2, 0], 20, 0.0, priority=9)
    device, now = Device(4, None), 0.0
    scheduler.add(long, now)
    while not long.ended:
        scheduler.add(Request(f"{now}", 3, [1, 1, 1], 3, now), now)
        plan = scheduler.plan(now)
        now += 1
        scheduler.update(plan, device.read(device.launch(plan)), now, 1.0)
        assert now < 10 + 2 * 20 + 10


@pytest.mark.parametrize("order", ORDERS.names)
def test_the_scheduler_keeps_nothing_of_requests_that_ended(order: str):
    policy = PolicyConfig.model_validate({"order": order, "predictor": "noisy_oracle", "aging_ms": 2000})
    scheduler = Scheduler(SchedulerConfig(2, 8, 40, None, 8, policy), PagePool(8, 4))
    requests = [Request(f"{i}", 3, [1, 1, 1], 9, 0.0) for i in range(8)]
    alive = [ref(request) for request in requests]
    while requests:
        scheduler.add(requests.pop(), 0.0)
    scheduler.cancel("5", 0.0)

    def run() -> None:
        device, now = Device(4, None), 0.0
        while scheduler.has_work:
            now += 1
            plan = scheduler.plan(now)
            scheduler.update(plan, device.read(device.launch(plan)), now, 1.0)

    run()
    assert not any(request() for request in alive)
