"""The three batching modes of SSJF §3.2."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from helpers.steps import Steps
from jaxspec.sched import PolicyConfig


def dynamic(seqs: int = 4, size: int = 3, timeout: float = 2.0, **more: Any) -> Steps:
    return Steps(seqs, batching="dynamic", max_batch_size=size, batch_wait_timeout_ms=timeout * 1000, **more)


def test_no_batching_serves_one_after_the_other():
    run = Steps(seqs=4, batching="none", order="sjf", predictor="oracle")
    for name, length in zip("abc", (3, 1, 2), strict=True):
        run.add(name, length)
    assert run.steps(6) == "b c c a a a"


def test_a_full_batch_starts_at_once_and_runs_to_its_end():
    run = dynamic()
    for name, length in zip("abcd", (1, 3, 2, 5), strict=True):
        run.add(name, length)
    assert run.steps(1) == "abc"
    run.add("e", 1)  # a leaves a slot free, but the batch has begun
    assert run.steps(3) == "bc b de"  # d has waited for longer than the timeout


def test_a_batch_that_is_not_full_waits_for_the_timeout():
    run = dynamic()
    run.add("a", 2)
    run.now = 0.5
    run.add("b", 2)
    assert not run.plan().scheduled and run.scheduler.wake(run.now) == 2.0
    run.now = 1.9
    assert not run.plan().scheduled
    run.now = 2.0
    assert run.scheduler.wake(run.now) is None  # it is time already
    assert run.steps(2) == "ab ab"
    assert run.scheduler.wake(run.now) is None


def test_the_wait_counts_from_arrival_also_while_a_batch_runs():
    run = dynamic()
    for name in "abc":
        run.add(name, 4)
    run.step()
    run.add("d", 1)  # at 1.0
    assert run.steps(4) == "abc abc abc d"
    run.add("e", 1)
    assert not run.plan().scheduled and run.scheduler.wake(run.now) == run.now + 2.0


def test_the_order_says_who_is_in_the_batch():
    run = dynamic(size=2, order="sjf", predictor="oracle")
    for name, length in zip("abcd", (9, 1, 8, 2), strict=True):
        run.add(name, length)
    assert run.steps(3) == "bd d ac"


def test_a_batch_comes_in_as_the_tokens_of_a_step_allow():
    run = dynamic(tokens=8)
    for name in "abc":
        run.add(name, 4, prompt=6)
    run.add("d", 1)
    assert run.steps(3) == "ab abc abc"
    while run.scheduler.num_running:
        assert "d" not in run.step()


def test_who_loses_its_pages_comes_back_into_its_batch():
    run = dynamic(size=2, seqs=2, pages=5)
    for name in "ab":
        run.add(name, 14)
    run.now += 2
    for name in "cd":
        run.add(name, 1)
    assert run.finish()[:2] == ["a", "b"]
    assert run.scheduler.num_preemptions > 0


def test_no_more_run_than_may():
    run = dynamic(seqs=2, size=8)
    for name in "abcd":
        run.add(name, 1)
    assert run.steps(2) == "ab cd"


def test_cancelled_requests_free_their_slots():
    run = dynamic(tokens=8, size=2)
    run.add("a", 2, prompt=8)
    run.add("b", 2)
    assert run.steps(1) == "a"
    run.scheduler.cancel("b", run.now)
    assert run.steps(1) == "a"
    run.add("c", 1)
    assert not run.plan().scheduled and run.scheduler.wake(run.now) == run.now + 2.0


@pytest.mark.parametrize("order", ["las", "laps_sd", "priority"])
def test_a_batch_is_not_preempted(order: Any):
    with pytest.raises(ValidationError, match="preempts"):
        PolicyConfig(order=order, batching="dynamic")
