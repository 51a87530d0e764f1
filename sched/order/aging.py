"""Aging: an upper bound on waiting, for any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request


class Aging(Order):
    """Wraps an order: requests that have waited too long go before all others, first come, first served.

    They stay first until they finish and cannot be preempted. So a request waits at most for those promoted before it,
    however many shorter ones arrive.
    """

    def __init__(self, order: Order) -> None:
        self._order, self.preemptive = order, order.preemptive
        self.rule = f"{order.rule}, or those that have waited too long"
        self._promoted = PerRequest(lambda _: False)

    def promote(self, request: Request) -> None:
        self._promoted.set(request, True)

    def key(self, request: Request) -> Any:
        return (0,) if self._promoted.of(request) else (1, self._order.key(request))

    def begins(self) -> None:
        self._order.begins()

    def started(self, request: Request) -> None:
        self._order.started(request)

    def rekeyed(self) -> Iterable[Request]:
        return self._order.rekeyed()

    def preemptible(self, request: Request) -> bool:
        return not self._promoted.of(request) and self._order.preemptible(request)

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        self._order.observe(request, result, seconds)
