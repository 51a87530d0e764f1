"""The waiting queue: waiting, paused and swapped requests by priority and by time in the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from jaxspec.sched.request import Request, RequestStatus


class IndexedHeap:
    """Requests by `key`, smaller first, then by number; everything takes O(log n) comparisons.

    A heap whose outdated entries stay until they come up or outnumber the others. Keys are taken when a request is
    pushed or updated: whoever changes what a key depends on has to say so.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._entries: dict[str, tuple[Any, int, int, Request]] = {}
        self._serial = count()  # requests themselves can't be compared

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        entry = self._entries.get(request.id)
        return entry is not None and entry[3] is request

    def __iter__(self) -> Iterator[Request]:
        """In order; this one sorts."""
        return (entry[3] for entry in sorted(self._entries.values()))

    def first(self) -> Request | None:
        """The request that goes first; None if the line is empty."""
        heap, entries = self._heap, self._entries
        while heap:
            request = heap[0][3]
            if entries.get(request.id) is heap[0]:
                return request
            heappop(heap)
        return None

    def ahead(self) -> Iterator[Request]:
        """In order, one at a time: the n-th takes O(log n). Nothing may change meanwhile."""
        heap, entries = self._heap, self._entries
        next_up = [(heap[0], 0)] if heap else []
        while next_up:
            entry, at = heappop(next_up)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(next_up, (heap[below], below))
            if entries.get(entry[3].id) is entry:
                yield entry[3]

    def push(self, request: Request) -> None:
        """Let a request in, or give one that is here the place that it has by now."""
        entry = (self._key(request), request.number, next(self._serial), request)
        self._entries[request.id] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def remove(self, request: Request) -> None:
        del self._entries[request.id]


class Reversed:
    """A key the other way round."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Reversed) -> bool:
        return other.key < self.key


class WaitTimes:
    """Waiting requests, the longest wait first. Times must not go backwards."""

    def __init__(self) -> None:
        self._young: OrderedDict[str, tuple[float, Request]] = OrderedDict()
        self._old: OrderedDict[str, tuple[float, Request]] = OrderedDict()  # these have been called overdue

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if nobody waits."""
        for line in (self._old, self._young):
            if line:
                return next(iter(line.values()))[0]
        return None

    def __iter__(self) -> Iterator[tuple[float, Request]]:
        """(when the wait began, request)."""
        for line in (self._old, self._young):
            yield from line.values()

    def begin(self, request: Request, now: float) -> None:
        self._young[request.id] = (now, request)

    def end(self, request: Request) -> None:
        if self._young.pop(request.id, None) is None:
            del self._old[request.id]

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """Those that have come to wait for `seconds` since the last call."""
        while self._young:
            name, (since, request) = next(iter(self._young.items()))
            if now < since + seconds:
                return
            self._old[name] = self._young.pop(name)
            yield request


class WaitingQueue:
    """Those that wait: the first in order at hand, the first and last of the paused ones too, and who waits longest.

    A request's state says which it is: WAITING without KV, PAUSED with its pages, or SWAPPED with its KV on the host.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._heap_of_all = IndexedHeap(key)
        self._first_paused = IndexedHeap(key)
        self._last_paused = IndexedHeap(lambda request: Reversed((key(request), request.number)))
        self._wait_times = WaitTimes()
        #: Pages that paused requests hold, shared ones counted for each.
        self.paused_pages = 0
        self._pages: dict[str, int] = {}
        self._swapped: set[str] = set()

    def __len__(self) -> int:
        return len(self._heap_of_all)

    def __iter__(self) -> Iterator[Request]:
        """In order; this one sorts."""
        return iter(self._heap_of_all)

    @property
    def num_paused(self) -> int:
        return len(self._last_paused)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if nobody waits."""
        return self._wait_times.oldest

    def first(self) -> Request | None:
        return self._heap_of_all.first()

    def ahead(self) -> Iterator[Request]:
        """In order, one at a time; nothing may change meanwhile."""
        return self._heap_of_all.ahead()

    def longest(self) -> Iterator[tuple[float, Request]]:
        """(when its wait began, request), the longest wait first; nothing may change meanwhile."""
        return iter(self._wait_times)

    def first_paused(self) -> Request | None:
        """The paused request that comes first in order."""
        return self._first_paused.first()

    def last_paused(self) -> Request | None:
        """The paused request that comes last in order."""
        return self._last_paused.first()

    def paused_backwards(self) -> Iterator[Request]:
        """Paused requests, the last in order first; nothing may change meanwhile."""
        return self._last_paused.ahead()

    def push(self, request: Request, now: float) -> None:
        self._heap_of_all.push(request)
        self._wait_times.begin(request, now)
        self._file(request)

    def remove(self, request: Request) -> None:
        self._heap_of_all.remove(request)
        self._wait_times.end(request)
        self._unfile(request)

    def change(self, request: Request, status: RequestStatus) -> None:
        """A request goes on waiting in another state."""
        self._unfile(request)
        request.status = status
        self._file(request)

    def _file(self, request: Request) -> None:
        if request.status is RequestStatus.PAUSED:
            self._first_paused.push(request)
            self._last_paused.push(request)
            self._pages[request.id] = len(request.pages)
            self.paused_pages += len(request.pages)
        elif request.status is RequestStatus.SWAPPED:
            self._swapped.add(request.id)

    def _unfile(self, request: Request) -> None:
        if request.status is RequestStatus.PAUSED:
            self._first_paused.remove(request)
            self._last_paused.remove(request)
            self.paused_pages -= self._pages.pop(request.id)
        elif request.status is RequestStatus.SWAPPED:
            self._swapped.remove(request.id)

    def move(self, request: Request) -> None:
        """Give a request the place that its key has got by now; nothing for one that is not here."""
        for line in (self._heap_of_all, self._first_paused, self._last_paused):
            if request in line:
                line.push(request)

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """Those that have come to wait for `seconds` since the last call."""
        return self._wait_times.overdue(seconds, now)
