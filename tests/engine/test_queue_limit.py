"""The limit of waiting requests: shares of tenants, and when a refused client should come back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import tiny
from helpers.generation import GREEDY
from jaxspec.engine.queue_limit import QueueLimit
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.scheduler import QueueFull


class Queue:
    """A limit of 10 on a clock that the test moves, and requests by tenant."""

    def __init__(self, longest_ms: float | None = None, free: int = 0) -> None:
        self.now, self.free = 0.0, free
        self.states: list[Any] = []
        self.limit = QueueLimit(10, longest_ms, lambda: self.now, lambda: (self.waiting, self.free))

    @property
    def waiting(self) -> int:
        return sum(s.request.status is not RequestStatus.RUNNING for s in self.states)

    def add(self, tenant: str, count: int = 1, status: RequestStatus = RequestStatus.WAITING) -> None:
        for _ in range(count):
            self.limit.check(tenant, self.states)
            self.states.append(SimpleNamespace(request=SimpleNamespace(tenant=tenant, status=status)))

    def end(self, count: int, gap: float, waiting: int = 1, together: int = 1) -> None:
        """As many turns of `gap` seconds, each of which ends `together` requests and leaves `waiting` others."""
        self.limit.turn(waiting)
        for _ in range(count):
            self.now += gap
            for _ in range(together):
                self.limit.ended(served=True)
            self.limit.turn(waiting)
        self.limit.turn(0)


def test_one_tenant_has_the_whole_queue() -> None:
    queue = Queue()
    queue.add("a", 10)
    with pytest.raises(QueueFull, match="10 requests are waiting"):
        queue.add("a")


def test_tenants_share_it() -> None:
    queue = Queue()
    queue.add("a", 2)
    queue.add("b", 5)
    with pytest.raises(QueueFull, match="5 of your requests"):
        queue.add("b")
    queue.add("a", 3)
    queue.now = 121.0  # b is gone
    queue.states = queue.states[:2]
    queue.add("a", 8)


def test_a_queue_with_many_places_left_has_no_shares() -> None:
    queue = Queue()
    for tenant in "abcdefghij":
        queue.add(tenant)
    queue.states.clear()
    queue.add("a", 5)  # more than a tenth


def test_a_refused_tenant_is_not_forgotten_before_it_comes_back() -> None:
    queue = Queue()
    queue.add("a", 10)
    with pytest.raises(QueueFull) as refused:
        queue.add("b")
    queue.now += refused.value.retry_after + 60
    queue.states = queue.states[:8]
    with pytest.raises(QueueFull, match="your share"):
        queue.add("a")
    queue.add("b")


def test_idle_time_does_not_count_as_pace() -> None:
    queue = Queue()
    queue.end(64, 0.1)
    queue.end(64, 600.0, waiting=0)
    queue.add("a", 10)
    with pytest.raises(QueueFull) as refused:
        queue.add("a")
    assert refused.value.retry_after == 1.0


def test_running_requests_take_no_place() -> None:
    queue = Queue()
    queue.add("b", 5)
    queue.add("a", 30, RequestStatus.RUNNING)
    queue.add("a", 5)
    with pytest.raises(QueueFull):
        queue.add("a")


@pytest.mark.parametrize(("gap", "seconds"), [(0.1, 1.0), (3.0, 3.0), (1000.0, 60.0)])
def test_a_refused_client_learns_when_to_come_back(gap: float, seconds: float) -> None:
    queue = Queue()
    queue.add("a", 10)
    queue.end(200, gap)
    with pytest.raises(QueueFull) as refused:
        queue.add("a")
    assert refused.value.retry_after == pytest.approx(seconds, rel=0.05)


def test_what_would_wait_too_long_is_refused() -> None:
    queue = Queue(longest_ms=2000.0)
    queue.add("a", 10)  # nothing is known yet
    queue.states.clear()
    queue.end(20, 0.5)
    queue.add("a", 4)
    with pytest.raises(QueueFull, match="4 requests are waiting already"):
        queue.add("a")
    with pytest.raises(QueueFull, match="4 requests"):
        queue.add("b")
    queue.states.pop()
    queue.add("b")
    with pytest.raises(QueueFull):
        queue.add("b")
    queue.states.clear()
    queue.end(70, 10.0)  # slower than the limit: one may wait
    queue.add("a")
    with pytest.raises(QueueFull, match="1 request is waiting"):
        queue.add("a")


def test_a_slow_trickle_of_requests_says_nothing_about_the_pace() -> None:
    queue = Queue(longest_ms=2000.0)
    queue.end(70, 10.0, waiting=0)
    queue.add("a", 10)


def test_what_gets_a_slot_at_once_does_not_wait() -> None:
    queue = Queue(longest_ms=2000.0)
    queue.end(20, 10.0)
    queue.free = 3
    queue.add("a", 4)  # three slots, and one may always wait
    with pytest.raises(QueueFull, match="4 requests"):
        queue.add("a")
    queue.states.clear()
    queue.free = 9
    queue.add("a", 10)


def test_ends_in_the_same_step_are_one_gap() -> None:
    queue = Queue(longest_ms=10_000.0)
    queue.end(20, 100.0, together=64)  # 64 requests in 100 s
    queue.add("a", 6)
    with pytest.raises(QueueFull, match="6 requests"):
        queue.add("a")


def test_clients_that_give_up_do_not_count_as_served() -> None:
    queue = Queue(longest_ms=4000.0)
    queue.end(20, 2.0)
    queue.add("a")
    for _ in range(100):
        queue.limit.ended(served=False)
        queue.limit.turn(1)
    queue.limit.turn(0)
    queue.add("a")
    with pytest.raises(QueueFull, match="2 requests"):
        queue.add("a")


def test_slots_without_pages_are_not_free() -> None:
    queue = Queue(longest_ms=4000.0)
    queue.end(20, 2.0)
    queue.free = 8
    queue.limit.turn(1)  # it waits although there are slots
    queue.add("a", 2)
    with pytest.raises(QueueFull, match="2 requests"):
        queue.add("a")
    assert queue.limit.refused == 1


def test_the_pace_follows_what_is_served_also_with_one_that_waits() -> None:
    """Each turn, the request that has waited gets the slot of the one that ended, and the next one comes."""
    queue = Queue(longest_ms=4000.0)
    queue.end(64, 10.0)
    for _ in range(70):
        for _ in range(10):
            queue.now += 0.01
            queue.limit.turn(1)
        queue.limit.ended(served=True)
        queue.now += 0.01
        queue.limit.turn(0)
    queue.add("a", 10)


def test_the_engine_refuses_what_would_wait_too_long() -> None:
    given = dict(max_num_seqs=1, token_buckets=[16], max_num_batched_tokens=16, max_queue_wait_ms=1e-3)
    with tiny.llm(**given) as llm:
        outputs = llm.generate([[i, 2] for i in range(30)], replace(GREEDY, max_tokens=4))  # `LLM` waits
        assert all(len(out.outputs[0].token_ids) == 4 for out in outputs)

        def crowd() -> None:
            for i in range(4):
                llm.engine.submit([i, 1], replace(GREEDY, max_tokens=100), lambda delta: None)

        with pytest.raises(QueueFull, match=r"(1 request is|2 requests are) waiting"):
            crowd()


def test_the_engine_keeps_a_greedy_tenant_from_taking_all_places() -> None:
    with tiny.llm(max_num_seqs=1, max_queued_requests=4, token_buckets=[16], max_num_batched_tokens=16) as llm:
        refused: list[tuple[str, str]] = []
        for tenant in ("polite", *["greedy"] * 5, "polite"):
            try:
                llm.engine.submit([1, 2], replace(GREEDY, max_tokens=200), lambda delta: None, tenant=tenant)
            except QueueFull as error:
                refused.append((tenant, str(error)))
        assert len(refused) >= 2
        assert all(tenant == "greedy" and "your share" in message for tenant, message in refused)
