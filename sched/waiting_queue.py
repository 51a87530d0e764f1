"""The waiting queue: waiting, paused and swapped requests by priority and by time in the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from jaxspec.sched.request import Request, RequestStatus

#: Share of its TTFT SLO after which a waiting request is overdue.
_TTFT_SHARE = 0.5


class IndexedHeap:
    """A priority queue of requests by `key`, then by number; all operations take O(log n) comparisons.

    A heap whose outdated entries stay until they reach the top or outnumber the others. Keys are computed by `push`:
    after a change of what a key depends on, push the request again.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._entries: dict[str, tuple[Any, int, int, Request]] = {}
        self._serial = count()  # requests cannot be compared

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        entry = self._entries.get(request.id)
        return entry is not None and entry[3] is request

    def __iter__(self) -> Iterator[Request]:
        """In order; O(n log n)."""
        return (entry[3] for entry in sorted(self._entries.values()))

    def first(self) -> Request | None:
        """The first request; None if empty."""
        heap, entries = self._heap, self._entries
        while heap:
            request = heap[0][3]
            if entries.get(request.id) is heap[0]:
                return request
            heappop(heap)
        return None

    def ahead(self) -> Iterator[Request]:
        """In order, lazily: O(log n) for the n-th. Don't modify the heap meanwhile."""
        heap, entries = self._heap, self._entries
        next_up = [(heap[0], 0)] if heap else []
        while next_up:
            entry, at = heappop(next_up)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(next_up, (heap[below], below))
            if entries.get(entry[3].id) is entry:
                yield entry[3]

    def push(self, request: Request) -> None:
        """Add a request, or move one to where its key now puts it."""
        entry = (self._key(request), request.number, next(self._serial), request)
        self._entries[request.id] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def remove(self, request: Request) -> None:
        del self._entries[request.id]
        if not self._entries:
            self._heap.clear()


class Reversed:
    """A key with reversed order."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Reversed) -> bool:
        return other.key < self.key


class WaitTimes:
    """Waiting requests by the time their wait began.

    Insertion is O(n) for a request that began to wait before others here, which happens only if it waited elsewhere.
    """

    def __init__(self) -> None:
        self._young: OrderedDict[str, tuple[float, Request]] = OrderedDict()
        self._old: OrderedDict[str, tuple[float, Request]] = OrderedDict()  # already returned by `overdue`
        #: Those with a TTFT SLO and no output yet, by when they are overdue for it.
        self._hurried = IndexedHeap(_overdue_for_ttft)

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if no request waits."""
        for line in (self._old, self._young):
            if line:
                return next(iter(line.values()))[0]
        return None

    def __iter__(self) -> Iterator[tuple[float, Request]]:
        """(when the wait began, request), longest wait first."""
        for line in (self._old, self._young):
            yield from line.values()

    def begin(self, request: Request, since: float) -> None:
        late = self._young and next(reversed(self._young.values()))[0] > since
        self._young[request.id] = (since, request)
        if late:
            self._young = OrderedDict(sorted(self._young.items(), key=lambda item: item[1][0]))
        if request.slo.ttft is not None and not request.output_len:
            self._hurried.push(request)

    def end(self, request: Request) -> None:
        if self._young.pop(request.id, None) is None:
            del self._old[request.id]
        if request in self._hurried:
            self._hurried.remove(request)

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """Requests whose wait has reached `seconds`, or that have waited for half of their TTFT SLO, since the last
        call. One may come twice, for both."""
        while self._young:
            name, (since, request) = next(iter(self._young.items()))
            if now < since + seconds:
                break
            self._old[name] = self._young.pop(name)
            yield request
        while (hurried := self._hurried.first()) is not None and now >= _overdue_for_ttft(hurried):
            self._hurried.remove(hurried)
            yield hurried


def _overdue_for_ttft(request: Request) -> float:
    assert request.slo.ttft is not None
    return request.arrival - request.waited + _TTFT_SHARE * request.slo.ttft


class WaitingQueue:
    """All requests that don't run, by priority; the paused ones among them; and all by waiting time.

    A request's status is WAITING (without KV), PAUSED (with its pages) or SWAPPED (KV on the host).
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._all = IndexedHeap(key)
        self._first_paused = IndexedHeap(key)
        self._last_paused = IndexedHeap(lambda request: Reversed((key(request), request.number)))
        self._wait_times = WaitTimes()
        #: Pages that paused requests hold; shared pages count once per request.
        self.paused_pages = 0
        self._pages: dict[str, int] = {}
        self._swapped: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        """In order; O(n log n)."""
        return iter(self._all)

    @property
    def num_paused(self) -> int:
        return len(self._last_paused)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if no request waits."""
        return self._wait_times.oldest

    def first(self) -> Request | None:
        return self._all.first()

    def ahead(self) -> Iterator[Request]:
        """In order, lazily. Don't modify the queue meanwhile."""
        return self._all.ahead()

    def longest(self) -> Iterator[tuple[float, Request]]:
        """(when its wait began, request), longest wait first. Don't modify the queue meanwhile."""
        return iter(self._wait_times)

    def first_paused(self) -> Request | None:
        """The paused request that comes first in order."""
        return self._first_paused.first()

    def last_paused(self) -> Request | None:
        """The paused request that comes last in order."""
        return self._last_paused.first()

    def paused_backwards(self) -> Iterator[Request]:
        """Paused requests, the last in order first. Don't modify the queue meanwhile."""
        return self._last_paused.ahead()

    def push(self, request: Request, since: float) -> None:
        """Add a request. `since`: when its wait began."""
        self._all.push(request)
        self._wait_times.begin(request, since)
        self._index(request)

    def remove(self, request: Request) -> None:
        self._all.remove(request)
        self._wait_times.end(request)
        self._unindex(request)

    def change(self, request: Request, status: RequestStatus) -> None:
        """Set the status of a request that keeps waiting, and move it to where its key then puts it."""
        self._unindex(request)
        request.status = status
        self._all.push(request)
        self._index(request)

    def _index(self, request: Request) -> None:
        if request.status is RequestStatus.PAUSED:
            self._first_paused.push(request)
            self._last_paused.push(request)
            self._pages[request.id] = len(request.pages)
            self.paused_pages += len(request.pages)
        elif request.status is RequestStatus.SWAPPED:
            self._swapped.add(request.id)

    def _unindex(self, request: Request) -> None:
        if request.status is RequestStatus.PAUSED:
            self._first_paused.remove(request)
            self._last_paused.remove(request)
            self.paused_pages -= self._pages.pop(request.id)
        elif request.status is RequestStatus.SWAPPED:
            self._swapped.remove(request.id)

    def move(self, request: Request) -> None:
        """Move a request to where its key now puts it. Requests that are not here are ignored."""
        for line in (self._all, self._first_paused, self._last_paused):
            if request in line:
                line.push(request)

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """See `WaitTimes.overdue`."""
        return self._wait_times.overdue(seconds, now)
