"""MLFQ: a multi-level feedback queue, which needs no length prediction."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from pydantic import Field, PositiveFloat

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Section, SlotContext


class MlfqSettings(Section):
    """`order: mlfq`: a multi-level feedback queue."""

    #: Number of queues.
    queues: int = Field(default=4, ge=1, le=64)
    #: Attained service, in ms, after which a request leaves the first queue.
    quantum_ms: PositiveFloat = 200.0
    #: The quantum of a queue relative to that of the queue above it.
    growth: float = Field(default=2.0, gt=1)


@ORDERS.register("mlfq", MlfqSettings)
class Mlfq(Order):
    """A new request starts in the first queue. When it has used up a queue's quantum, it moves to the next one.

    A request preempts running requests of lower queues. Within a queue, requests go first come, first served, and a
    running one keeps its slot.
    """

    preemptive = True
    rule = "requests that have been served little go first"

    def __init__(self, bounds: list[float]) -> None:
        """`bounds`: attained service in seconds at which a request leaves each queue but the last."""
        self._bounds = bounds

    @classmethod
    def build(cls, settings: MlfqSettings, context: SlotContext) -> Mlfq:
        bounds, total = [], 0.0
        for queue in range(settings.queues - 1):
            total += settings.quantum_ms / 1000 * settings.growth**queue
            bounds.append(total)
        return cls(bounds)

    def key(self, request: Request) -> Any:
        return bisect_right(self._bounds, request.attained)
