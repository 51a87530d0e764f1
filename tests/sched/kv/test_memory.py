"""All memory policies: no page is lost on the device or the host, and KV that returns is the KV that left."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drive import TIMES, Drive, policies
from helpers.paged import Device, Job, Slice, crowd, jobs
from helpers.steps import Steps
from jaxspec.sched import PagePool, Plan, PolicyConfig, Request, RequestStatus, Scheduler, SchedulerConfig, SwapCosts
from jaxspec.sched.kv.defer import Defer
from jaxspec.sched.kv.host_pages import HostPagePool
from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.kv.swap import Swap
from jaxspec.sched.kv.wait_time import first_of

CHEAP, DEAR = SwapCosts(1e-6, 1e-6, 1.0, 1.0), SwapCosts(9.0, 9.0, 1e-6, 1.0)


class SwapDevice(Device):
    """A device with host memory that carries out the transfers of plans."""

    def __init__(self, page_size: int, drafts: Random | None) -> None:
        super().__init__(page_size, drafts)
        self.host: dict[tuple[int, int], int] = {}

    def launch(self, plan: Plan) -> list[Slice]:
        before = dict(self.memory)
        for moved in plan.offload:
            for page, host in zip(moved.device, moved.host, strict=True):
                for i in range(self.page_size):
                    self.host[host, i] = before.get((page, i), -1)
        for moved in plan.upload:
            for page, host in zip(moved.device, moved.host, strict=True):
                for i in range(self.page_size):
                    self.memory[page, i] = self.host[host, i]
        return super().launch(plan)


class Swapping(Drive):
    """Checks the transfers of every plan, too."""

    device_kind = SwapDevice

    def plan(self, now: float) -> Plan:
        scheduler = self.scheduler
        requests = (*scheduler.running, *scheduler.waiting)
        held = {r.id: (list(r.pages), list(r.host_pages), r.computed) for r in requests}
        plan = super().plan(now)
        self.log.append([(m.request.id, m.device, m.host) for m in (*plan.offload, *plan.upload)])

        def ids(moves):
            return {m.request.id for m in moves}

        out, back, planned = ids(plan.offload), ids(plan.upload), {w.request.id: w for w in plan.scheduled}
        assert len(out) == len(plan.offload) and len(back) == len(plan.upload) and not out & back
        assert out <= ids_of(plan.preempted) and not out & planned.keys()
        host_written = [page for m in plan.offload for page in m.host]
        host_read = [page for m in plan.upload for page in m.host]
        device_written = [page for m in plan.upload for page in m.device]
        for pages in (host_written, host_read, device_written):
            assert len(set(pages)) == len(pages)
        assert not set(host_written) & set(host_read)
        for m in plan.offload:
            pages, _, computed = held[m.request.id]
            assert 0 < len(m.device) == len(m.host) == scheduler.pool.pages_for(m.request.computed)
            assert list(m.host) == m.request.host_pages and m.request.status is RequestStatus.SWAPPED
            if pages:  # else this very plan admitted it with a cached prefix and preempted it again
                assert list(m.device) == pages[: len(m.device)] and m.request.computed == computed
        for m in plan.upload:
            _, hosts, computed = held[m.request.id]
            assert 0 < len(m.device) == len(m.host) and list(m.host) == hosts[-len(m.host) :]
            assert set(m.device) <= set(m.request.pages) and not m.request.host_pages
            assert m.request.computed == computed and m.request.status in (RequestStatus.PAUSED, RequestStatus.RUNNING)
            # Its KV is under way: it runs only if no other request does.
            assert m.request.id not in planned or next(iter(plan.scheduled)).request is m.request
        if defers(scheduler):
            assert not plan.preempted
        return plan

    @property
    def guesses(self) -> bool:
        return not defers(self.scheduler)

    def check_aging(self, now: float, since: dict[str, float], ran: set[str]) -> None:
        if self.scheduler.config.policy.memory != "defer":  # there an admitted request continues if no other one fits
            super().check_aging(now, since, ran)

    def check_books(self) -> None:
        scheduler, memory = self.scheduler, self.scheduler.kv
        running, waiting = scheduler.running, list(scheduler.waiting)
        scheduler.pool.check([request.pages for request in (*running, *waiting)])
        assert all(request.status is RequestStatus.RUNNING and not request.host_pages for request in running)
        for request in waiting:
            status = (
                RequestStatus.PAUSED
                if request.pages
                else RequestStatus.SWAPPED
                if request.host_pages
                else RequestStatus.WAITING
            )
            assert request.status is status and not (request.pages and request.host_pages)
            assert status is not RequestStatus.SWAPPED or len(request.host_pages) == scheduler.pool.pages_for(
                request.computed
            )
            assert status is not RequestStatus.WAITING or not request.computed
        assert scheduler.waiting.paused_pages == sum(len(request.pages) for request in waiting)
        assert scheduler.num_swapped == sum(request.status is RequestStatus.SWAPPED for request in waiting)
        assert waiting == sorted(waiting, key=lambda r: (scheduler.order.key(r), r.number)), "keys went stale"
        if scheduler.config.policy.order != "pairwise":  # where it errs, there is no one order
            assert list(scheduler.waiting.ahead()) == waiting
        if isinstance(memory, Swap):
            memory.host.check([request.host_pages for request in waiting])
            assert 0 <= scheduler.host_usage <= 1
        if isinstance(memory, Defer):
            kept = (*running, *(r for r in waiting if r.pages))
            assert memory._held == sum(len(r.pages) for r in kept)
            assert memory._total == sum(memory._reserved.values()) and memory._reserved.keys() == ids_of(kept)
            assert all(len(r.pages) <= memory._reserved[r.id] for r in kept)
            assert memory._total - memory._held <= scheduler.pool.num_free or not defers(scheduler)

    def check_end(self) -> None:
        super().check_end()
        assert self.scheduler.num_swaps == sum(r.swaps for r in self.requests.values())
        assert not self.scheduler.num_swapped and self.scheduler.host_usage == 0
        if defers(self.scheduler):
            assert self.scheduler.num_preemptions == 0


def defers(scheduler: Scheduler) -> bool:
    """Whether requests never lose pages: reserved by max_tokens, or by the true length."""
    return scheduler.config.policy.memory == "defer" and scheduler.config.policy.predictor != "noisy_oracle"


def ids_of(requests: Any) -> set[str]:
    return {request.id for request in requests}


many = st.lists(jobs, min_size=1, max_size=12)


@st.composite
def swapping(draw: st.DrawFn, jobs: list[Job], seed: int, **fixed: Any) -> Swapping:
    """From pools barely enough for one request and no host up to plenty of both."""
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    policy = draw(policies(memory=draw(st.sampled_from(["auto", "defer", "recompute", "swap", "swap"]))))
    policy = policy.model_copy(update=fixed)
    seqs, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    config = SchedulerConfig(
        seqs, seqs + draw(st.integers(0, 20)), longest, None, seqs + draw(st.integers(0, 8)), policy,
        host_pages=draw(st.sampled_from([0, 2, 5, 12, 100])), exact_swap=draw(st.booleans()),
        costs=draw(st.sampled_from([None, CHEAP, DEAR])), swap_pages=draw(st.sampled_from([None, 1, 4])), times=TIMES,
    )  # fmt: skip
    pages = -(-longest // page_size) + draw(st.integers(0, 12))
    pool = PagePool(pages, page_size, draw(st.sampled_from([True, True, False])))
    return Swapping(Scheduler(config, pool), jobs, Random(seed))


@settings(max_examples=400, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_every_request_ends_and_says_what_it_says_alone(data: st.DataObject, jobs: list[Job], seed: int):
    data.draw(swapping(jobs, seed)).run()


@pytest.mark.parametrize("order", ["fcfs", "las", "alise"])
@settings(max_examples=150, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_swapping_loses_nothing(order: str, data: st.DataObject, jobs: list[Job], seed: int):
    data.draw(swapping(jobs, seed, order=order, memory="swap", batching="continuous")).run()


@settings(max_examples=100, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_the_same_events_lead_to_the_same_decisions(data: st.DataObject, jobs: list[Job], seed: int):
    first = data.draw(swapping(jobs, seed))
    config, pool = first.scheduler.config, first.scheduler.pool
    again = Swapping(
        Scheduler(config, PagePool(pool.num_pages, pool.page_size, pool.enable_prefix_caching)), jobs, Random(seed)
    )
    first.run()
    again.run()
    assert first.log == again.log


@settings(max_examples=100, deadline=None)
@given(st.data(), many, st.integers(0, 99))
def test_without_a_host_auto_is_recompute(data: st.DataObject, jobs: list[Job], seed: int):
    first = data.draw(swapping(jobs, seed))
    logs = []
    for memory in ("auto", "recompute", "swap"):
        c, pool = first.scheduler.config, first.scheduler.pool
        policy = c.policy.model_copy(update={"memory": memory})
        config = SchedulerConfig(
            c.max_num_seqs, c.max_num_batched_tokens, c.max_model_len, None, c.max_logit_rows, policy, times=TIMES
        )
        scheduler = Scheduler(config, PagePool(pool.num_pages, pool.page_size, pool.enable_prefix_caching))
        assert type(scheduler.kv) is KVCacheManager
        run = Swapping(scheduler, jobs, Random(seed))
        run.run()
        logs.append(run.log)
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("order", ["fcfs", "priority", "las", "alise"])
def test_the_properties_meet_swaps_uploads_ahead_and_a_full_host(order: str):
    """The workloads above would prove little if nothing were ever moved, or everything always fitted."""
    swaps = lost = uploads = ahead = 0
    for seed in range(20):
        random = Random(seed)
        jobs = crowd(random)
        policy = PolicyConfig.model_validate(
            {"order": order, "las": {"quantum_ms": 1000}, "predictor": "noisy_oracle", "memory": "swap",
             "alise": {"first_threshold_ms": 50}}
        )  # fmt: skip
        config = SchedulerConfig(3, 8, 40, None, 4, policy, host_pages=3)
        run = Swapping(Scheduler(config, PagePool(10, 4)), jobs, random)
        run.run()
        swaps += run.scheduler.num_swaps
        lost += run.scheduler.num_preemptions - run.scheduler.num_swaps
        moves = [entry for entry in run.log if isinstance(entry, list)]
        uploads += sum(len(entry) for entry in moves)
        ahead += sum(1 for entry in moves if entry)
    assert swaps > 20 and lost > 5 and uploads > swaps


# --- the rules, one at a time -----------------------------------------------------------------------------------------


def swap(**more: Any) -> Steps:
    given = {"order": "priority", "memory": "swap", "host": 64} | more
    return Steps(**given)


def test_a_request_in_want_of_pages_sends_later_ones_to_the_host():
    run = swap(seqs=2, pages=8)  # of 4 tokens
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 4, prompt=16)
    plan = run.plan()
    assert plan.preempted == (low,) and [w.request.id for w in plan.scheduled] == ["high"]
    (out,) = plan.offload
    assert (out.request, out.device, len(out.host)) == (low, (0, 1, 2, 3, 4), 5)
    assert (low.status, low.computed, low.swaps, low.recompute_until) == (RequestStatus.SWAPPED, 20, 1, None)
    run.answer(plan)
    assert run.finish() == ["high", "low"]
    assert run.scheduler.recomputed_tokens == 0 and low.preemptions == 1 and run.scheduler.num_swaps == 1


def test_kv_comes_back_in_a_step_of_the_others_and_its_request_runs_in_the_next():
    run = swap(seqs=2, pages=9)
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 4, prompt=16)
    run.add("higher", 9, prompt=1, priority=-1)
    run.steps(5)
    assert low.status is RequestStatus.SWAPPED and "high" in run.done
    plan = run.plan()
    assert [w.request.id for w in plan.scheduled] == ["higher"] and [m.request for m in plan.upload] == [low]
    run.answer(plan)
    assert low.status is RequestStatus.PAUSED
    plan = run.plan()
    assert [(w.request.id, w.start) for w in plan.scheduled] == [("higher", 6), ("low", 21)] and not plan.upload
    run.answer(plan)
    assert run.finish() == ["high", "higher", "low"] and low.recomputed == 0


def test_a_full_host_means_recomputing():
    run = swap(seqs=2, pages=8, host=4)
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 4, prompt=16)
    plan = run.plan()
    assert (
        plan.preempted == (low,)
        and not plan.offload
        and low.status is RequestStatus.WAITING
        and low.recompute_until == 20
    )
    run.answer(plan)
    assert run.finish() == ["high", "low"]


@pytest.mark.parametrize(("costs", "swaps"), [(CHEAP, 1), (DEAR, 0), (None, 1)])
def test_auto_does_what_costs_less(costs: SwapCosts | None, swaps: int):
    run = swap(seqs=2, pages=8, memory="auto", costs=costs)
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 4, prompt=16)
    run.step()
    assert low.swaps == swaps and low.preemptions == 1
    assert run.finish() == ["high", "low"]


def test_what_the_device_still_has_is_not_moved():
    run = swap(seqs=2, pages=8)
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 1, prompt=16)
    run.step()
    assert low.status is RequestStatus.SWAPPED
    moves = []
    while low.status is not RequestStatus.RUNNING:
        plan = run.plan()
        moves += [len(m.device) for m in plan.upload]
        run.answer(plan)
    assert moves == [1] and low.recomputed == 0  # of its five pages; high took the three free ones and the last of its
    assert run.finish() == ["high", "low"]


@pytest.mark.parametrize(("exact", "found"), [(True, 6), (False, 5)])
def test_what_follows_inexact_kv_is_not_offered_to_other_prompts(exact: bool, found: int):
    run = swap(seqs=2, pages=9, exact=exact)
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()  # its first five pages are there, and exact
    run.add("high", 1, prompt=16)
    assert run.finish() == ["high", "low"] and low.swaps == 1
    assert len(run.scheduler.pool.match(low.tokens, 27)) == found


def test_host_pages_come_back_with_the_next_plan():
    host = HostPagePool(3)
    pages = host.allocate(2)
    assert pages == [0, 1] and host.allocate(2) is None and host.usage == 2 / 3
    host.release([1])
    assert host.num_free == 1 and host.num_used == 1
    host.check([[0]])
    host.settle()
    assert host.num_free == 2 and host.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match="not held"):
        HostPagePool(1).release([0])
    with pytest.raises(ValueError, match="host_pages"):
        HostPagePool(-1)
    with pytest.raises(AssertionError, match="differ from those of the requests"):
        host.check([[0]])


@pytest.mark.parametrize(("most", "moved"), [(None, 3), (1, 1), (4, 2), (5, 2), (6, 3)])
def test_no_more_is_moved_ahead_of_need_than_a_step_can_bear(most: int | None, moved: int):
    """Three requests of two pages each; one is moved in any case, or nothing ever would be."""
    memory = KVCacheManager(PagePool(10, 4))
    waiting = [Request(str(i), 5, [0] * 5, 5, 0.0, computed=5) for i in range(3)]
    assert first_of(waiting, most, memory) == waiting[:moved]
    assert CHEAP.pages_within(0.1) == max(1, int(0.1 * CHEAP.decode_step / CHEAP.swap(1)))
    assert SwapCosts(0, 0, 0, 1).pages_within(0.1) > 1e9


def test_costs_and_host_pages_are_checked():
    with pytest.raises(ValueError, match="upload_page"):
        SwapCosts(0.0, -1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="host_pages"):
        SchedulerConfig(1, 1, 1, None, 1, host_pages=-1)
    assert SwapCosts(1.0, 2.0, 0.5, 1.0).swap(3) == 9 and SwapCosts(1.0, 2.0, 0.5, 1.0).recompute(4) == 2
