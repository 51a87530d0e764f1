"""LAS: least attained service."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request


class Las(Order):
    """LAPS-SD's baseline (§3): the request that has been served the least time goes first and preempts others.

    Times are compared in whole quanta of `quantum` seconds (0: exactly), so that two requests do not preempt each other
    at every step.
    """

    preemptive = True

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum

    def key(self, request: Request) -> Any:
        return request.attained // self._quantum if self._quantum else request.attained
