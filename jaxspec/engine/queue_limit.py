"""How many requests may wait, of one tenant and of all, and when a refused client should come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import ceil
from statistics import fmean

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.scheduler import QueueFull

#: Seconds for which a tenant that has asked counts as one of those who share the queue: longer than `_LATEST`, so that
#: one that was refused still does when it comes back.
_ACTIVE = 120.0
#: Gaps between ends of requests whose mean is the pace of the queue, and how many of them there must be.
_GAPS, _ENOUGH = 64, 8
#: Share of the queue that should have emptied when a refused client comes back; bounds of that time in seconds.
_EMPTIED, _SOONEST, _LATEST = 0.1, 1.0, 60.0


class QueueLimit:
    """At most `most` requests wait. While half of these places are taken, tenants that have asked in the last two
    minutes have equal shares of them, so that one that sends without pause does not keep the others out.

    `longest_ms`: milliseconds that a request may be expected to wait, None for any time. The expectation is the number
    of waiting requests times the pace at which requests have ended while others waited, so it needs a few of those.
    `clock`: monotonic seconds. Not thread-safe.
    """

    def __init__(self, most: int, clock: Callable[[], float], longest_ms: float | None = None) -> None:
        self._most, self._clock = most, clock
        self._longest = None if longest_ms is None else longest_ms / 1e3
        self._asked: dict[str, float] = {}  # when each tenant has last asked
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._end: float | None = None  # when a request has last ended, if others waited then

    def check(self, tenant: str, waiting: int, states: Iterable[RequestState]) -> None:
        """Raise `QueueFull` if the tenant may not add a request. `waiting`: of all tenants; `states`: all requests."""
        now = self._clock()
        self._asked[tenant] = now
        self._asked = {name: at for name, at in self._asked.items() if at > now - _ACTIVE}
        most = self._places()
        if waiting >= most:
            told = "1 request is" if waiting == 1 else f"{waiting} requests are"
            raise QueueFull(f"{told} waiting already; try again later", self._seconds(most))
        if (tenants := len(self._asked)) == 1 or 2 * waiting < most:
            return
        share = ceil(most / tenants)
        own = sum(s.request.tenant == tenant and s.request.status is not RequestStatus.RUNNING for s in states)
        if own >= share:
            message = f"{own} of your requests are waiting already, your share of the queue; try again later"
            raise QueueFull(message, self._seconds(most))

    def ended(self, waiting: int) -> None:
        """A request has ended while so many wait. Gaps without a queue say how fast requests came, not how fast they
        are served."""
        now = self._clock()
        if self._end is not None:
            self._gaps.append(now - self._end)
        self._end = now if waiting else None

    def _places(self) -> int:
        """Requests that may wait now."""
        if self._longest is None or len(self._gaps) < _ENOUGH or not (pace := self._pace()):
            return self._most
        return min(self._most, max(1, int(self._longest / pace)))

    def _pace(self) -> float:
        """Seconds per ended request, without the longest gap: a stall of the machine."""
        gaps = sorted(self._gaps)
        return fmean(gaps[:-1] or gaps)

    def _seconds(self, most: int) -> float:
        """Seconds in which a part of the queue empties, by the pace of the latest requests."""
        return min(max(_EMPTIED * most * self._pace(), _SOONEST), _LATEST) if self._gaps else _SOONEST
