"""All requests that don't run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.sched.line import Backwards, Line
from jaxspec.sched.request import Request, State
from jaxspec.sched.waits import Waits


class Queue:
    """Waiting and paused requests: the first in order at hand, the last of the paused ones too, and who waits longest.

    A request's state says which it is: WAITING without pages, or PAUSED with its pages.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._line = Line(key)
        self._paused = Line(lambda request: Backwards((key(request), request.number)))
        self._waits = Waits()
        #: Pages that paused requests hold, shared ones counted for each.
        self.paused_pages = 0
        self._pages: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        """In order; this one sorts."""
        return iter(self._line)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if nobody waits."""
        return self._waits.oldest

    def first(self) -> Request | None:
        return self._line.first()

    def last_paused(self) -> Request | None:
        """The paused request that comes last in order."""
        return self._paused.first()

    def push(self, request: Request, now: float) -> None:
        self._line.push(request)
        self._waits.begin(request, now)
        if request.state is State.PAUSED:
            self._paused.push(request)
            self._pages[request.id] = len(request.pages)
            self.paused_pages += len(request.pages)

    def remove(self, request: Request) -> None:
        self._line.remove(request)
        self._waits.end(request)
        if request.state is State.PAUSED:
            self.unpause(request)

    def unpause(self, request: Request) -> None:
        """A paused request goes on waiting without its pages."""
        self._paused.remove(request)
        self.paused_pages -= self._pages.pop(request.id)

    def move(self, request: Request) -> None:
        """Give a request the place that its key has got by now; nothing for one that is not here."""
        for line in (self._line, self._paused):
            if request in line:
                line.push(request)

    def overdue(self, seconds: float, now: float) -> Iterator[Request]:
        """Those that have come to wait for `seconds` since the last call."""
        return self._waits.overdue(seconds, now)
