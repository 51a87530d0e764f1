"""Why a request waits or rests, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.steps import Steps
from jaxspec.sched import Request
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.slo import Slo, current_slack
from jaxspec.sched.slots import ORDERS
from jaxspec.sched.waiting_reason import QueueState, why_throttled, why_waiting

FREE = QueueState(
    running=1, slots=4, batches=False, wanted_pages=1, free_pages=9, fits=True, paced=False,
    rule="earlier requests go first",
)  # fmt: skip
FULL = replace(FREE, running=4)


def request(**changes: Any) -> Request:
    return Request("r", 1, [5], 10, 0.0, **changes)


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"running": 4}, "All 4 slots are taken."),
        ({"running": 1, "slots": 1}, "The only slot is taken."),
        ({"wanted_pages": 10}, "No free KV pages: the next request needs 10, 9 are free."),
        ({"fits": False}, "The free KV pages are kept for running requests: the next answer would not fit."),
        ({"paced": True}, "The pace lets few prompts run while requests have a TPOT SLO."),
        ({}, "The step has no room for more prompts."),
        ({"batches": True}, "The running batch has to end first."),
        ({"batches": True, "running": 0}, "The next batch waits for more requests."),
    ],
)  # fmt: skip
def test_what_keeps_the_queue_from_moving(changes: dict[str, Any], obstacle: str) -> None:
    assert why_waiting(request(), 0, replace(FREE, **changes)) == f"{obstacle} It is next."


def test_who_is_ahead_and_by_which_rule() -> None:
    assert why_waiting(request(), 1, FULL).endswith("1 request is ahead of it: earlier requests go first.")
    assert why_waiting(request(), 3, FULL).endswith("3 requests are ahead of it: earlier requests go first.")


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"status": RequestStatus.PAUSED}, "Paused: a request that goes first took its slot"),
        ({"status": RequestStatus.SWAPPED}, "Swapped out: others needed its KV pages"),
        ({"recompute_until": 3}, "Preempted: others needed its KV pages"),
    ],
)
def test_what_it_has_lost(changes: dict[str, Any], begins: str) -> None:
    assert why_waiting(request(**changes), 0, FULL).startswith(begins)


def test_why_a_running_request_rests() -> None:
    decoding = Request("r", 1, [5, 6], 10, 0.0, computed=1)
    assert why_throttled(decoding, replace(FREE, paced=True)).startswith(
        "It skips this step: the pace keeps steps short"
    )
    assert why_throttled(request(), FREE) == "Its prompt waits: the tokens of the step went to other requests."


def test_a_schedulers_queue() -> None:
    steps = Steps(seqs=2, order="sjf", predictor="oracle", aging_ms=1e9)
    for name, length in (("a", 5), ("b", 5), ("long", 9), ("short", 3)):
        steps.add(name, true_len=length)
    steps.step()
    queue = QueueState.of(steps.scheduler)
    first, second = steps.scheduler.waiting
    assert why_waiting(first, 0, queue) == "All 2 slots are taken. It is next."
    rule = "shorter predicted answers go first, or those that have waited too long"
    assert why_waiting(second, 1, queue) == f"All 2 slots are taken. 1 request is ahead of it: {rule}."


def test_pages_run_out() -> None:
    steps = Steps(seqs=4, pages=4, page=4)
    steps.add("big", max_tokens=3, prompt=13)
    steps.add("next", max_tokens=3, prompt=6)
    steps.step()
    queue = QueueState.of(steps.scheduler)
    assert why_waiting(steps.requests["next"], 0, queue) == (
        "No free KV pages: the next request needs 2, 0 are free. It is next."
    )


def test_pages_kept_for_running_requests() -> None:
    steps = Steps(seqs=4, pages=8, page=4, memory="defer")
    steps.add("big", max_tokens=25, prompt=4)
    steps.add("next", max_tokens=8, prompt=4)
    steps.step()
    assert "kept for running requests" in why_waiting(steps.requests["next"], 0, QueueState.of(steps.scheduler))


def test_dynamic_batches() -> None:
    steps = Steps(seqs=4, batching="dynamic", max_batch_size=2)
    steps.add("a")
    before = QueueState.of(steps.scheduler)
    assert why_waiting(steps.requests["a"], 0, before).startswith("The next batch waits")
    steps.add("b")
    steps.add("c")
    steps.step()
    assert why_waiting(steps.requests["c"], 0, QueueState.of(steps.scheduler)).startswith(
        "The running batch has to end"
    )


def test_looking_changes_nothing() -> None:
    looked, other = (Steps(seqs=2, batching="dynamic", order="sjf") for _ in range(2))
    for steps in (looked, other):
        for i in range(7):
            steps.add(f"r{i}", max_tokens=2 + i % 3)
    for _ in range(30):
        QueueState.of(looked.scheduler)
        assert looked.step() == other.step()
    assert looked.done == other.done


def test_every_order_says_what_goes_first() -> None:
    for name in ORDERS.names:
        assert "first" in ORDERS[name].rule and ORDERS[name].rule != "the order puts them first", name


def test_the_target_that_counts_now() -> None:
    both = request(slo=Slo(tpot=0.1, ttft=1.0))
    assert current_slack(both, 0.4) == ("ttft", pytest.approx(0.6))
    both.first_token = 0.5
    both.tokens += [6, 7]  # two output tokens: the next one is due 0.2 s after the first
    assert current_slack(both, 0.6) == ("tpot", pytest.approx(0.1))
    assert current_slack(request(), 9.0) is None
    assert current_slack(request(slo=Slo(tpot=0.1)), 9.0) is None
