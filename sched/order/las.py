"""LAS: least attained service."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Section, SlotContext


class LasSettings(Section):
    """`order: las`: least attained service, a baseline of LAPS-SD (§3)."""

    #: Attained service is rounded down to multiples of this many ms, so that requests do not alternate at every step.
    #: 0: no rounding.
    quantum_ms: float = Field(default=100.0, ge=0)


@ORDERS.register("las", LasSettings)
class Las(Order):
    """LAPS-SD's baseline (§3): the request that has been served the least time goes first and preempts others.

    Times are compared in whole quanta of `quantum` seconds (0: exactly), so that two requests do not preempt each other
    at every step.
    """

    preemptive = True
    rule = "requests that have been served least go first"

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum

    @classmethod
    def build(cls, settings: LasSettings, context: SlotContext) -> Las:
        return cls(settings.quantum_ms / 1000)

    def key(self, request: Request) -> Any:
        return request.attained // self._quantum if self._quantum else request.attained
