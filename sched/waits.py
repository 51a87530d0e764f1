"""Who waits since when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from jaxspec.sched.request import Request


class Waits:
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
