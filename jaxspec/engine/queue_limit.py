"""How many requests may wait, of one tenant and of all, and when a refused client should come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import ceil

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.scheduler import QueueFull

#: Seconds for which a tenant that has asked counts as one of those who share the queue: longer than `_LATEST`, so that
#: one that was refused still does when it comes back.
_ACTIVE = 120.0
#: Gaps between ends of requests from which the pace of the queue is computed, and how many of them there must be.
_GAPS, _ENOUGH = 64, 8
#: Requests that end within this many seconds have ended in the same step.
_SAME_STEP = 1e-3
#: Share of the queue that should have emptied when a refused client comes back; bounds of that time in seconds.
_EMPTIED, _SOONEST, _LATEST = 0.1, 1.0, 60.0


class QueueLimit:
    """At most `most` requests wait. While half of these places are taken, tenants that have asked in the last two
    minutes have equal shares of them, so that one that sends without pause does not keep the others out.

    `longest_ms`: milliseconds that a request may be expected to wait, None for any time. The expectation is the number
    of requests that wait for others to end, times the pace at which requests have ended while others waited, so it
    needs a few of those. `clock`: monotonic seconds. `queue` gives the waiting requests of all tenants, and the free
    slots, which some of those get in the next step. Not thread-safe.
    """

    def __init__(
        self, most: int, longest_ms: float | None, clock: Callable[[], float], queue: Callable[[], tuple[int, int]]
    ) -> None:
        self._most, self._clock, self._queue = most, clock, queue
        self._longest = None if longest_ms is None else longest_ms / 1e3
        self._asked: dict[str, float] = {}  # when each tenant has last asked
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_GAPS)  # seconds, and requests that ended after them
        self._end: float | None = None  # when a request has last ended, if others waited then
        #: Requests refused so far.
        self.refused = 0

    def check(self, tenant: str, states: Iterable[RequestState]) -> None:
        """Raise `QueueFull` if the tenant may not add a request. `states`: all requests."""
        now, (waiting, free) = self._clock(), self._queue()
        self._asked[tenant] = now
        self._asked = {name: at for name, at in self._asked.items() if at > now - _ACTIVE}
        most = self._places(free)
        if waiting >= most:
            told = "1 request is" if waiting == 1 else f"{waiting} requests are"
            self._refuse(f"{told} waiting already; try again later", most)
        if (tenants := len(self._asked)) == 1 or 2 * waiting < most:
            return
        share = ceil(most / tenants)
        own = sum(s.request.tenant == tenant and s.request.status is not RequestStatus.RUNNING for s in states)
        if own >= share:
            self._refuse(f"{own} of your requests are waiting already, your share of the queue; try again later", most)

    def ended(self, served: bool) -> None:
        """A request has ended. `served`: it has run; else it was cancelled while it waited."""
        now, (waiting, free) = self._clock(), self._queue()
        if served and self._end is not None:
            if self._gaps and now - self._end < _SAME_STEP:
                seconds, ended = self._gaps[-1]
                self._gaps[-1] = seconds, ended + 1
            else:
                self._gaps.append((now - self._end, 1))
        if served or waiting <= free:  # without a queue, gaps say how fast requests come, not how fast they are served
            self._end = now if waiting > free else None

    def _refuse(self, message: str, most: int) -> None:
        self.refused += 1
        raise QueueFull(message, self._seconds(most))

    def _places(self, free: int) -> int:
        """Requests that may wait now."""
        if self._longest is None or len(self._gaps) < _ENOUGH or not (pace := self._pace()):
            return self._most
        return min(self._most, free + max(1, int(self._longest / pace)))

    def _pace(self) -> float:
        """Seconds per ended request, without the longest gap: a stall of the machine."""
        gaps = sorted(self._gaps)[:-1] or list(self._gaps)
        return sum(seconds for seconds, _ in gaps) / sum(ended for _, ended in gaps)

    def _seconds(self, most: int) -> float:
        """Seconds in which a part of the queue empties, by the pace of the latest requests."""
        return min(max(_EMPTIED * most * self._pace(), _SOONEST), _LATEST) if self._gaps else _SOONEST
