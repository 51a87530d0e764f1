"""No wait without end, whatever the order."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request


class Aging(Order):
    """An order in which requests that have waited too long go before all others, first come, first served.

    They stay there until they end, and keep their seats: so however many shorter ones arrive, a request waits at most
    for those that were promoted before it.
    """

    def __init__(self, order: Order) -> None:
        self._order, self.preemptive = order, order.preemptive
        self._promoted: set[str] = set()

    def promote(self, request: Request) -> None:
        self._promoted.add(request.id)

    def key(self, request: Request) -> Any:
        return (0,) if request.id in self._promoted else (1, self._order.key(request))

    def preemptible(self, request: Request) -> bool:
        return request.id not in self._promoted and self._order.preemptible(request)

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        self._order.observe(request, result, seconds)

    def forget(self, request: Request) -> None:
        self._promoted.discard(request.id)
        self._order.forget(request)
