"""All requests that don't run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.sched.line import Backwards, Line
from jaxspec.sched.request import Request, State
from jaxspec.sched.waits import Waits


class Queue:
    """Those that wait: the first in order at hand, the first and last of the paused ones too, and who waits longest.

    A request's state says which it is: WAITING without KV, PAUSED with its pages, or SWAPPED with its KV on the host.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._line = Line(key)
        self._first_paused = Line(key)
        self._last_paused = Line(lambda request: Backwards((key(request), request.number)))
        self._waits = Waits()
        #: Pages that paused requests hold, shared ones counted for each.
        self.paused_pages = 0
        self._pages: dict[str, int] = {}
        self._swapped: set[str] = set()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        """In order; this one sorts."""
        return iter(self._line)

    @property
    def num_paused(self) -> int:
        return len(self._last_paused)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if nobody waits."""
        return self._waits.oldest

    def first(self) -> Request | None:
        return self._line.first()

    def ahead(self) -> Iterator[Request]:
        """In order, one at a time; nothing may change meanwhile."""
        return self._line.ahead()

    def longest(self) -> Iterator[tuple[float, Request]]:
        """(when its wait began, request), the longest wait first; nothing may change meanwhile."""
        return iter(self._waits)

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
        self._line.push(request)
        self._waits.begin(request, now)
        self._file(request)

    def remove(self, request: Request) -> None:
        self._line.remove(request)
        self._waits.end(request)
        self._unfile(request)

    def change(self, request: Request, state: State) -> None:
        """A request goes on waiting in another state."""
        self._unfile(request)
        request.state = state
        self._file(request)

    def _file(self, request: Request) -> None:
        if request.state is State.PAUSED:
            self._first_paused.push(request)
            self._last_paused.push(request)
            self._pages[request.id] = len(request.pages)
            self.paused_pages += len(request.pages)
        elif request.state is State.SWAPPED:
            self._swapped.add(request.id)

    def _unfile(self, request: Request) -> None:
        if request.state is State.PAUSED:
            self._first_paused.remove(request)
            self._last_paused.remove(request)
            self.paused_pages -= self._pages.pop(request.id)
        elif request.state is State.SWAPPED:
            self._swapped.remove(request.id)

    def move(self, request: Request) -> None:
        """Give a request the place that its key has got by now; nothing for one that is not here."""
        for line in (self._line, self._first_paused, self._last_paused):
            if request in line:
                line.push(request)

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """Those that have come to wait for `seconds` since the last call."""
        return self._waits.overdue(seconds, now)
