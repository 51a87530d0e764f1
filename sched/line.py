"""A queue whose first request is always at hand, in an order that may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from jaxspec.sched.request import Request


class Line:
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


class Backwards:
    """A key the other way round."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Backwards) -> bool:
        return other.key < self.key
