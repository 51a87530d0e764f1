"""Pauses: who keeps what, who loses it first, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.steps import Steps
from jaxspec.sched import RequestStatus


def priority(**more: Any) -> Steps:
    return Steps(order="priority", **more)


def test_a_paused_request_continues_where_it_stopped():
    run = priority()
    low = run.add("low", 6, prompt=9, priority=1)
    run.steps(3)
    pages = list(low.pages)
    run.add("high", 2)
    run.step()
    assert (low.status, low.pages, low.computed) == (RequestStatus.PAUSED, pages, 11)
    run.step()
    plan = run.plan()
    assert [(w.request.id, w.start, w.count) for w in plan.scheduled] == [("low", 11, 1)]
    run.answer(plan)
    assert (low.pauses, low.preemptions, low.recomputed, run.scheduler.recomputed_tokens) == (1, 0, 0, 0)


def test_paused_requests_lose_their_pages_first_and_the_last_in_order_before_others():
    run = priority(pages=9)  # of 4 tokens
    low, lower = run.add("low", 12, prompt=8, priority=1), run.add("lower", 12, prompt=8, priority=2)
    run.scheduler.cancel("lower", 0)
    lower = run.add("lower", 12, prompt=8, priority=2)
    run.steps(2)
    run.add("mid", 1, prompt=8)
    run.step()  # low is paused with 3 pages, mid takes 2
    assert low.status is RequestStatus.PAUSED and len(low.pages) == 3 and lower.status is RequestStatus.WAITING
    big = run.add("big", 4, prompt=27, priority=-1)
    plan = run.plan()
    assert plan.preempted == (low,) and [w.request.id for w in plan.scheduled] == ["big"]
    run.answer(plan)
    assert (low.status, low.preemptions, low.pauses, low.recompute_until) == (RequestStatus.WAITING, 1, 1, 9)
    while big.status is not RequestStatus.FINISHED:
        run.step()
    run.step(2.0)
    # Nine tokens were there, what the prefix cache still has is spared: a plain prompt of two full pages at most.
    assert 0 < low.recomputed <= 9 and low.recomputed == run.scheduler.recomputed_tokens
    assert 0 < run.scheduler.recompute_seconds < 2.0
    assert run.finish()


def test_a_request_that_lost_its_pages_writes_a_token_before_it_is_paused_again():
    run = Steps(order="las", las={"quantum_ms": 0}, pages=6, tokens=4, seqs=2)
    for name in "ab":
        run.add(name, 10, prompt=12)
    for _ in range(400):
        if not run.scheduler.has_work:
            break
        before = {r.id: (r.recompute_until is not None, r.output_len) for r in run.requests.values()}
        plan = run.plan()
        for request in plan.paused:
            lost, _ = before[request.id]
            assert not lost
        run.answer(plan)
    assert sorted(run.done) == ["a", "b"] and run.scheduler.num_preemptions > 0


def test_no_more_are_paused_than_the_step_has_tokens_for():
    run = Steps(seqs=4, tokens=8, order="priority")
    for name in "abcd":
        run.add(name, 20, priority=1)
    run.steps(2)
    for name in "wxyz":
        run.add(name, 5, prompt=30)
    plan = run.plan()
    assert len(plan.paused) == 1 and sum(w.count for w in plan.scheduled) == 8
    assert len(plan.scheduled) == 4  # three continue decoding, w's prompt gets the remaining tokens
    run.answer(plan)
    assert run.finish()


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_long_prompt_does_not_keep_the_step_from_those_before_it(max_num_seqs: int):
    run = Steps(seqs=max_num_seqs, tokens=8, order="priority")
    long = run.add("long", 2, prompt=80, priority=1)
    run.step()
    run.add("high", 3, prompt=6)
    assert run.steps(3) == ("high high high" if max_num_seqs == 1 else "highlong highlong highlong")
    assert (long.pauses, long.computed) == (1, 8) if max_num_seqs == 1 else (0, 8 + 2 + 7 + 7)
    assert run.finish() == ["high", "long"]


def test_a_request_that_lacks_pages_takes_them_from_later_ones_although_a_slot_is_free():
    run = Steps(seqs=2, pages=8, order="priority")
    low = run.add("low", 8, prompt=20, priority=1)
    run.step()
    run.add("high", 4, prompt=16)
    plan = run.plan()
    assert plan.paused == plan.preempted == (low,) and [w.request.id for w in plan.scheduled] == ["high"]
    run.answer(plan)
    assert run.finish() == ["high", "low"]


def test_no_request_is_paused_for_one_that_would_still_not_fit():
    run = Steps(seqs=2, pages=8, order="priority")
    run.add("pin", 9, prompt=15, priority=-9)
    run.add("low", 9, prompt=3, priority=1)
    run.step()
    run.add("mid", 4, prompt=20)  # 5 pages; 4 are pin's
    plan = run.plan()
    assert plan.paused == plan.preempted == () and len(plan.scheduled) == 2
    run.answer(plan)
    assert run.finish()


def test_cancelling_a_paused_request_frees_its_pages():
    run = priority()
    low = run.add("low", 6, prompt=9, priority=1)
    run.steps(2)
    run.add("high", 3)
    run.step()
    assert run.scheduler.num_paused == 1 == run.scheduler.num_waiting
    assert run.scheduler.cancel("low", run.now) and low.status is RequestStatus.CANCELLED and not low.pages
    run.check()
    assert run.finish() == ["high"]
