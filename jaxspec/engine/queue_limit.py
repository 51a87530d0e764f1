"""How many requests may wait, of one tenant and of all, and when a refused client should come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import ceil
from statistics import fmean

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.scheduler import QueueFull

#: Seconds for which a tenant that has asked counts as one of those who share the queue: longer than `_LATEST`, so that
#: one that was refused still does when it comes back.
_ACTIVE = 120.0
#: Ended requests whose pace tells how fast the queue gets shorter.
_ENDS = 64
#: Share of the queue that should have emptied when a refused client comes back; bounds of that time in seconds.
_EMPTIED, _SOONEST, _LATEST = 0.1, 1.0, 60.0


class QueueLimit:
    """At most `most` requests wait. While half of these places are taken, tenants that have asked in the last two
    minutes have equal shares of them, so that one that sends without pause does not keep the others out. `clock`:
    monotonic seconds. Not thread-safe.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._asked: dict[str, float] = {}  # when each tenant has last asked
        self._ends: deque[float] = deque(maxlen=_ENDS)

    def check(self, tenant: str, waiting: int, states: Iterable[RequestState]) -> None:
        """Raise `QueueFull` if the tenant may not add a request. `waiting`: of all tenants; `states`: all requests."""
        now = self._clock()
        self._asked[tenant] = now
        self._asked = {name: at for name, at in self._asked.items() if at > now - _ACTIVE}
        if waiting >= self._most:
            raise QueueFull(f"{self._most} requests are waiting already; try again later", self._seconds())
        if (tenants := len(self._asked)) == 1 or 2 * waiting < self._most:
            return
        share = ceil(self._most / tenants)
        own = sum(s.request.tenant == tenant and s.request.status is not RequestStatus.RUNNING for s in states)
        if own >= share:
            message = f"{own} of your requests are waiting already, your share of the queue; try again later"
            raise QueueFull(message, self._seconds())

    def ended(self) -> None:
        """A request has ended, so another one need not wait any more."""
        self._ends.append(self._clock())

    def _seconds(self) -> float:
        """Seconds in which a part of the queue empties, by the pace of the latest requests."""
        if len(self._ends) < 2:
            return _SOONEST
        gaps = sorted(later - earlier for earlier, later in pairwise(self._ends))
        each = fmean(gaps[:-1] or gaps)  # in the longest one the engine may have been idle
        return min(max(_EMPTIED * self._most * each, _SOONEST), _LATEST)
