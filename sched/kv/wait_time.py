"""Which requests' KV should be on the device, by estimated wait time (ALISE §3.2, Algorithm 2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import accumulate
from typing import Any

from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.timing import Runtime, SwapCosts
from jaxspec.sched.waiting_queue import WaitingQueue

#: KV should be on the device this many steps before its request's turn, plus the time to free pages for it.
AHEAD = 8


def plan_swaps(
    running: Sequence[Request],
    waiting: WaitingQueue,
    kv: KVCacheManager,
    key: Callable[[Request], Any],
    runtime: Runtime,
    free_slots: int,
    promoted_after: float | None,
    costs: SwapCosts | None,
    most_pages: int | None,
    now: float,
) -> tuple[list[Request], list[Request]]:
    """-> (requests to upload, in this order; requests to offload to free pages), see `select_swaps`.

    `key` is the order's key, `most_pages` the configuration's `swap_pages`. Looks ahead `AHEAD` steps plus the time to
    move the whole pool out and in again.
    """
    soon = AHEAD * runtime.d + (costs.swap(kv.pool.num_pages) if costs else 0.0)

    def place(request: Request) -> tuple[Any, int]:
        return key(request), request.number

    jobs = by_wait(running, waiting, place, runtime.remaining, free_slots, promoted_after, now)
    coming, going = select_swaps(jobs, soon, waiting, kv, len(running))
    return first_of(coming, most_pages, kv), first_of(going, most_pages, kv)


def first_of(moving: list[Request], most_pages: int | None, kv: KVCacheManager) -> list[Request]:
    """The first requests, at least one, whose pages one step can move in addition to its work."""
    if most_pages is None:
        return moving
    pages = list(accumulate(kv.pool.pages_for(request.computed) for request in moving))
    return moving[: max(1, bisect_right(pages, most_pages))]


def by_wait(
    running: Sequence[Request],
    waiting: WaitingQueue,
    place: Callable[[Request], Any],
    remaining: Callable[[Request], float],
    free_slots: int,
    promoted_after: float | None,
    now: float,
) -> Iterator[tuple[float, Request]]:
    """(estimated wait in seconds, request) of all waiting requests, the shortest wait first.

    A request waits for the remaining time of all before it, but at most until aging promotes it (Eq. 7), not
    counting TTFT SLOs. Unlike the paper's sum, this divides by the number of running requests, and the first
    `free_slots` do not wait.
    O(log w) per request taken, with w waiting, and O(n log n) for n running requests.
    """
    sources = [_in_order(running, waiting, place, remaining, free_slots)]
    if promoted_after is not None:
        sources.append((max(0.0, since + promoted_after - now), request) for since, request in waiting.longest())
    seen: set[str] = set()
    for seconds, request in merge(*sources, key=lambda job: job[0]):
        if request.id not in seen:
            seen.add(request.id)
            yield seconds, request


def _in_order(
    running: Sequence[Request],
    waiting: WaitingQueue,
    place: Callable[[Request], Any],
    remaining: Callable[[Request], float],
    free_slots: int,
) -> Iterator[tuple[float, Request]]:
    before = sorted((place(r), remaining(r)) for r in running)
    before.reverse()
    at_once, total = max(1, len(running)), 0.0
    for ahead, request in enumerate(waiting.ahead()):
        here = place(request)
        while before and before[-1][0] < here:
            total += before.pop()[1]
        yield 0.0 if ahead < free_slots else total / at_once, request
        total += remaining(request)


def select_swaps(
    jobs: Iterable[tuple[float, Request]], soon: float, waiting: WaitingQueue, kv: KVCacheManager, spare: int
) -> tuple[list[Request], list[Request]]:
    """-> (requests to upload, in this order; requests to offload).

    Of `jobs` (from `by_wait`), those that wait less than `soon` seconds get pages on the device, shortest wait first,
    while running requests keep theirs and `spare` pages to grow. Of the other paused requests the last in order are
    offloaded, only as many as needed: other KV may stay until its pages are needed.
    """
    pool = kv.pool
    room = pool.num_free + waiting.paused_pages - spare
    lacking = spare - pool.num_free
    coming: list[Request] = []
    kept: set[str] = set()
    for seconds, request in jobs:
        missing = max(0, kv.missing_pages(request))  # it may have spare pages from drafting
        room -= missing + len(request.pages)
        if seconds > soon or room < 0:
            break
        kept.add(request.id)
        lacking += missing
        if request.status is RequestStatus.SWAPPED and not kv.swapping_out(request):
            coming.append(request)
    going: list[Request] = []
    for request in waiting.paused_backwards():
        if lacking <= 0:
            break
        if request.id not in kept and not kv.swapping_in(request):
            going.append(request)
            lacking -= len(request.pages)
    return coming, going
