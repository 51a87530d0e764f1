"""What MLFQ promises. In the project this would be a file in tests/sched/order/."""

from __future__ import annotations

from typing import Any

from helpers.steps import Steps

#: Steps take one second. A request leaves the first queue after two of them, the second after four more; its first
#: token is no service yet, so it has three steps in the first queue.
MLFQ: dict[str, Any] = {"order": "mlfq", "mlfq": {"queues": 3, "quantum_ms": 2000}}


def test_a_short_request_overtakes_long_ones_that_have_used_up_their_quantum():
    run = Steps(**MLFQ)
    run.add("a", 20)
    run.add("b", 20)
    assert run.steps(7) == "a a a b b b b"
    run.add("s", 2)
    assert run.steps(2) == "s s"
    assert run.scheduler.num_pauses == 2 and list(run.done) == ["s"]


def test_a_request_moves_down_after_each_quantum_and_stays_in_the_last_queue():
    run = Steps(**MLFQ)
    request = run.add("a", 40)
    queues = []
    for _ in range(20):
        run.step()
        queues.append(run.scheduler.order.key(request))
    assert queues == 2 * [0] + 4 * [1] + 14 * [2]


def test_requests_that_moved_down_go_first_come_first_served():
    run = Steps(**MLFQ)
    for name in "abcd":
        run.add(name, 7)
    assert run.steps(12) == "a a a b b b c c c d d d"
    # The running one goes on: those of its own queue do not preempt it.
    assert run.finish() == ["d", "a", "b", "c"]


def test_without_length_predictions_short_requests_end_first():
    run = Steps(**MLFQ)
    for name, length in (("l", 30), ("m", 6), ("s", 2)):
        run.add(name, length)
    assert run.finish() == ["s", "m", "l"]
