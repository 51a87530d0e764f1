"""Estimated wait times and Algorithm 2, against a plain computation over all waiting requests."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched import PagePool, Request, RequestStatus
from jaxspec.sched.kv.swap import Swap
from jaxspec.sched.kv.wait_time import by_wait, select_swaps
from jaxspec.sched.waiting_queue import IndexedHeap, WaitingQueue


def request(i: int, seconds: float, pages: int = 0, status: RequestStatus = RequestStatus.WAITING) -> Request:
    made = Request(str(i), 1, [0], 99, 0.0, number=i, predicted_len=seconds, status=status)
    made.pages = list(range(pages))
    return made


def key(r: Request) -> Any:
    return r.expected_len


def place(r: Request) -> Any:
    return key(r), r.number


def seconds_of(r: Request) -> float:
    return r.expected_len


waits = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(waits, st.lists(st.integers(1, 9), max_size=4), st.integers(0, 3), st.one_of(st.none(), st.integers(1, 60)))
def test_waits_are_what_remains_of_all_before_but_aging_ends_them(jobs, busy, free_slots, aging):
    queue, now = WaitingQueue(key), 50.0
    waiting = []
    for i, (length, since) in enumerate(sorted(jobs, key=lambda job: job[1])):
        r = request(i, length)
        queue.push(r, float(since))
        waiting.append((r, float(since)))
    running = [request(100 + i, length) for i, length in enumerate(busy)]
    expected = {}
    for r, since in waiting:
        others = [o for o, _ in waiting if place(o) < place(r)]
        ahead = sum(seconds_of(o) for o in (*others, *running) if place(o) < place(r))
        wait = 0.0 if len(others) < free_slots else ahead / max(1, len(running))
        expected[r.id] = wait if aging is None else min(wait, max(0.0, since + aging - now))
    found = list(by_wait(running, queue, place, seconds_of, free_slots, aging, now))
    assert [seconds for seconds, _ in found] == sorted(seconds for seconds, _ in found)
    assert {r.id: round(seconds, 9) for seconds, r in found} == {i: round(w, 9) for i, w in expected.items()}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60), st.integers(0, 99))
def test_a_line_goes_ahead_in_order_whatever_was_done_to_it(steps, seed):
    line, random, known, made = IndexedHeap(key), Random(seed), {}, 0
    for what, value in steps:
        if what == 0 or not known:
            known[str(made)] = request(made, value)
            line.push(known[str(made)])
            made += 1
        elif what == 1:
            r = random.choice(list(known.values()))
            r.predicted_len = float(value)
            line.push(r)
        else:
            line.remove(known.pop(random.choice(list(known))))
        assert list(line.ahead()) == sorted(known.values(), key=place) == list(line)


def swap(pages: int, taken: int) -> Swap:
    """A pool with some pages in use."""
    pool = PagePool(pages, 1)
    pool.allocate(taken)
    return Swap(pool, 100, True, None)


def test_who_waits_least_is_kept_or_comes_in_and_the_last_in_order_make_room():
    queue = WaitingQueue(key)
    first, second, third, last = (
        request(1, 1, status=RequestStatus.SWAPPED),
        request(2, 2, 2, RequestStatus.PAUSED),
        request(3, 3, 1, RequestStatus.PAUSED),
        request(4, 4, 2, RequestStatus.PAUSED),
    )  # fmt: skip
    first.tokens = [0, 0]
    for r in (first, second, third, last):
        queue.push(r, 0.0)
    jobs = [(0.0, first), (1.0, second), (2.0, third), (3.0, last)]
    # Two pages for the first, two for the second and one for the third are the five of the pool.
    coming, going = select_swaps(jobs, 99.0, queue, swap(5, 5), 0)
    assert (coming, going) == ([first], [last])
    # One kept free for those that run costs the third its place; one of its and two of the last make up for three.
    assert select_swaps(jobs, 99.0, queue, swap(5, 5), 1) == ([first], [last, third])
    # No pages are freed that no request needs.
    assert select_swaps(jobs, 99.0, queue, swap(7, 5), 0) == ([first], [])
    # Nor for those whose turn is a long way off.
    assert select_swaps([(10.0, first)], 5.0, queue, swap(5, 5), 0) == ([], [])
