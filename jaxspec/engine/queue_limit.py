"""How many requests may wait, of one tenant and of all, and when a refused client should come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import ceil

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.request import RequestStatus
from jaxspec.sched.scheduler import QueueFull

#: Seconds for which a tenant that has asked counts as one of those who share the queue: longer than `_LATEST`, so that
#: one that was refused still does when it comes back.
_ACTIVE = 120.0
#: Turns in which requests have ended, from which the pace of the queue is computed, and how many there must be.
_TURNS, _ENOUGH = 64, 8
#: Share of the queue that should have emptied when a refused client comes back; bounds of that time in seconds.
_EMPTIED, _SOONEST, _LATEST = 0.1, 1.0, 60.0


class QueueLimit:
    """At most `most` requests wait. While half of these places are taken, tenants that have asked in the last two
    minutes have equal shares of them, so that one that sends without pause does not keep the others out.

    `longest_ms`: milliseconds that a request may be expected to wait, None for any time. The expectation is the number
    of waiting requests times the mean time between the ends of the latest requests that ended while others waited, so
    it needs a few of those. Free slots are taken at once, so they add places, and one request may always wait. `clock`:
    monotonic seconds. `queue` gives the waiting requests of all tenants, and the free slots. Not thread-safe.
    """

    def __init__(
        self, most: int, longest_ms: float | None, clock: Callable[[], float], queue: Callable[[], tuple[int, int]]
    ) -> None:
        self._most, self._clock, self._queue = most, clock, queue
        self._longest = None if longest_ms is None else longest_ms / 1e3
        self._asked: dict[str, float] = {}  # when each tenant has last asked
        self._gaps: deque[tuple[float, int]] = deque(maxlen=_TURNS)  # seconds, and requests that ended after them
        self._turn = clock()  # when the latest turn has ended
        self._left = 0  # requests that it left waiting
        self._seconds_with_queue, self._ended = 0.0, 0  # since the latest gap
        #: Requests refused so far.
        self.refused = 0

    def check(self, tenant: str, states: Iterable[RequestState]) -> None:
        """Raise `QueueFull` if the tenant may not add a request. `states`: all requests."""
        now, (waiting, free) = self._clock(), self._queue()
        if self._left:  # slots that cannot be used: there are no pages, or a batch has to end first
            free = 0
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

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with a request in the last two minutes, as of the latest `check`."""
        return self._asked.keys()

    def ended(self, served: bool) -> None:
        """A request has ended. `served`: it has run; else it was cancelled while it waited."""
        self._ended += served

    def turn(self, left: int) -> None:
        """A turn of the engine has ended. `left`: requests that its plan has left waiting. Time without any says how
        fast requests come, not how fast they are served."""
        now = self._clock()
        if self._left:  # else the engine may have been idle
            self._seconds_with_queue += now - self._turn
        if self._ended:
            if self._seconds_with_queue:
                self._gaps.append((self._seconds_with_queue, self._ended))
            self._seconds_with_queue, self._ended = 0.0, 0
        elif not left:
            self._seconds_with_queue = 0.0
        self._turn, self._left = now, left

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
