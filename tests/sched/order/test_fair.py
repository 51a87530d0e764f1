"""Fair queueing over tenants."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.sched import PolicyConfig, Request, Scheduler
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.plan import RequestResult

#: Output tokens of every answer.
OUTPUT = 4


class Served:
    """Serves requests with one slot, a prompt token and an output token at a time. `order`: ids as they were begun."""

    def __init__(self, order: str, output: int = OUTPUT) -> None:
        self.output = output
        policy = PolicyConfig.model_validate({"order": order})
        self.scheduler = Scheduler(SchedulerConfig(1, 8, 64, None, 64, policy), PagePool(64, 4))
        self.begun: list[str] = []
        self.now = 0.0

    def add(self, name: str, tenant: str, prompt: int = 4) -> None:
        request = Request(name, prompt, [1] * prompt, self.output, self.now, tenant=tenant, reuse_prefix=False)
        self.scheduler.add(request, self.now)

    def step(self) -> None:
        self.now += 1
        plan = self.scheduler.plan(self.now)
        results: list[RequestResult] = []
        for s in plan.scheduled:
            if s.request.id not in self.begun:
                self.begun.append(s.request.id)
            last = s.request.output_len + 1 == self.output
            results.append(RequestResult((7,), "length" if last else None) if s.samples else RequestResult())
        self.scheduler.update(plan, results, self.now, 1.0)

    def finish(self) -> list[str]:
        while self.scheduler.has_work:
            self.step()
        return self.begun


def test_a_greedy_tenant_waits_for_itself() -> None:
    begun: dict[str, list[str]] = {}
    for order in ("fcfs", "fair"):
        served = Served(order)
        for i in range(20):
            served.add(f"g{i}", "greedy")
        for _ in range(3):
            served.step()
        for i in range(3):
            served.add(f"p{i}", "polite")
        begun[order] = served.finish()
    assert begun["fcfs"] == [f"g{i}" for i in range(20)] + ["p0", "p1", "p2"]
    assert begun["fair"].index("p2") <= 5  # one turn each


def test_turns_are_of_tokens() -> None:
    served = Served("fair")
    for i in range(4):
        served.add(f"long{i}", "a", prompt=20)
    for i in range(8):
        served.add(f"short{i}", "b", prompt=4)
    begun = served.finish()
    before_second = begun[: begun.index("long1")]
    assert sum(name.startswith("short") for name in before_second) == pytest.approx(24 / 8, abs=1)


def test_an_idle_tenant_saves_nothing_up() -> None:
    served = Served("fair")
    for i in range(6):
        served.add(f"a{i}", "a")
    for _ in range(20):
        served.step()  # b sleeps meanwhile
    for i in range(3):
        served.add(f"b{i}", "b")
    begun: Any = served.finish()
    assert begun.index("a5") < begun.index("b2")


def test_an_idle_engine_starts_afresh() -> None:
    """What a tenant had alone does not count against it later."""
    served = Served("fair")
    served.add("alone", "a", prompt=55)
    served.finish()
    for i in range(5):
        served.add(f"b{i}", "b", prompt=20)
    served.add("a0", "a")
    assert served.finish().index("a0") <= 2


def test_one_tenant_is_first_come_first_served() -> None:
    served = Served("fair")
    for i in range(5):
        served.add(f"r{i}", "", prompt=20 - 4 * i)
    assert served.finish() == [f"r{i}" for i in range(5)]


@pytest.mark.parametrize("output", [1, OUTPUT])
def test_a_tenant_that_comes_late_does_not_go_before_all_others(output: int) -> None:
    """Answers of one token never decode; their turns count, too."""
    served = Served("fair", output)
    for i in range(30):
        served.add(f"a{i}", "a")
    while len(served.begun) < 15:
        served.step()
    for i in range(15):
        served.add(f"b{i}", "b")
    begun = served.finish()
    assert abs(begun.index("a20") - begun.index("b5")) <= 3


def test_a_prediction_after_the_arrival_counts() -> None:
    """A client that leaves `max_tokens` open is not charged for it once its length is predicted."""
    served = Served("fair", 50)
    for i in range(4):
        served.add(f"a{i}", "a")
        served.add(f"b{i}", "b")
    for i in (2, 0, 1, 3):
        served.scheduler.predicted(f"a{i}", 2.0, served.now)
    served.add("a4", "a")
    served.add("b4", "b")
    tags = {request.id: served.scheduler.order.key(request) for request in served.scheduler.waiting}
    assert [tags[f"a{i}"] for i in range(5)] == [6 * i for i in range(5)]  # 4 prompt tokens and 2 predicted ones
    assert [tags[f"b{i}"] for i in range(5)] == [54 * i for i in range(5)]
    begun = served.finish()
    assert begun.index("a4") < begun.index("b1")


def test_one_tenant_stays_first_come_first_served_with_predictions() -> None:
    served = Served("fair", 50)
    for i in range(12):
        served.add(f"r{i:02}", "")
        if i % 3 == 2:
            served.scheduler.predicted(f"r{i - 1:02}", 3.0, served.now)
            served.scheduler.predicted(f"r{i - 2:02}", 90.0, served.now)
            served.step()
    assert served.finish() == sorted(served.begun)
