"""Whose KV should be on the device: by estimated wait time (ALISE §3.2, Algorithm 2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import accumulate
from typing import Any

from jaxspec.sched.kv.recompute import KVCacheManager
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.timing import Runtime, SwapCosts
from jaxspec.sched.waiting_queue import WaitingQueue

#: Steps ahead of its turn at which KV should be on the device, besides the time that it takes to make room for it.
AHEAD = 8


def arrange(
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
    """Who should come in from the host, in this order, and who should go there to make room: see `choose`.

    `key` is the order's, `most_pages` the configuration's `swap_pages`. Looks ahead for some steps, and
    for as long as it would take to move all that the device holds out and in again.
    """
    soon = AHEAD * runtime.d + (costs.swap(kv.pool.num_pages) if costs else 0.0)
    place = lambda request: (key(request), request.number)  # noqa: E731
    jobs = by_wait(running, waiting, place, runtime.remaining, free_slots, promoted_after, now)
    coming, going = choose(jobs, soon, waiting, kv, len(running))
    return first_of(coming, most_pages, kv), first_of(going, most_pages, kv)


def first_of(moving: list[Request], most_pages: int | None, kv: KVCacheManager) -> list[Request]:
    """Those that one step can move beside its own work, and at least one."""
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
    """(seconds, request) of all that wait, the shortest estimated wait first.

    A request waits for what remains of all before it, but no longer than until aging promotes it (Eq. 7). What the
    paper's sum leaves out: as many are served at once as run now, and with `free_slots` nobody waits for a slot.
    Takes O(log w) for each that is asked for, w being those that wait, and O(n log n) for the n that run.
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


def choose(
    jobs: Iterable[tuple[float, Request]], soon: float, waiting: WaitingQueue, kv: KVCacheManager, spare: int
) -> tuple[list[Request], list[Request]]:
    """Who should come in from the host, in this order, and who should go there to make room, for all `jobs` (as of
    `by_wait`) of the next `soon` seconds that the device holds beside those that run and `spare` pages for them.

    Those with the shortest waits keep their place on the device, or have theirs kept free. Of the others the last in
    order go, and no more of them than it takes: with a long wait, KV does no harm where nobody needs the room.
    """
    pool = kv.pool
    room = pool.num_free + waiting.paused_pages - spare
    lacking = spare - pool.num_free
    coming: list[Request] = []
    kept: set[str] = set()
    for seconds, request in jobs:
        missing = max(0, kv.missing_pages(request))  # one that was to draft may have pages to spare
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
