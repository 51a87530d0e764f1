"""Boost: first come, first served, but short requests count as having come earlier."""

from __future__ import annotations

from math import expm1, log
from typing import Any

from pydantic import PositiveFloat

from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext
from jaxspec.sched.timing import ResponseTimes, Runtime

#: The scale of boosts relative to the mean response time. In simulations with SSJF's predicted classes (`bench
#: orders`), larger ones exceed 1.1 times FCFS's p99.
_SHARE = 0.9


class BoostSettings(Section):
    """`order: boost`: arrival less a boost that falls with the predicted execution time."""

    #: The time scale 1 / γ of boosts, in ms: about the time by which a short request overtakes long ones. None: 0.9 of
    #: the mean response time that the last requests would have with FCFS.
    scale_ms: PositiveFloat | None = None


@ORDERS.register("boost", BoostSettings)
class Boost(Order):
    """γ-Boost (Yu and Scully 2024): smallest arrival - b(s) first, b(s) = -ln(1 - exp(-γ s)) / γ, without preemption.

    With exact times s and the decay rate γ of the response times' tail, it has the lightest possible tail where sizes
    are light-tailed. A request is overtaken only by ones that come within a bounded time after it, so none starves. s
    is the predicted execution time, by the runtime model when the prediction arrives.
    """

    needs = frozenset({Need.LENGTHS, Need.RUNTIME})
    rule = "earlier requests go first, and short ones sooner"

    def __init__(self, scale: float | None, runtime: Runtime, responses: ResponseTimes) -> None:
        self._scale, self._runtime, self._responses = scale, runtime, responses
        # The expected length and the boost for it: the models learn, but a waiting request keeps its key.
        self._boosts = PerRequest[tuple[float, float]](lambda r: (r.expected_len, self._boost(r)))

    @classmethod
    def build(cls, settings: BoostSettings, context: SlotContext) -> Boost:
        assert context.runtime is not None and context.responses is not None
        scale = None if settings.scale_ms is None else settings.scale_ms / 1000
        return cls(scale, context.runtime, context.responses)

    def key(self, request: Request) -> Any:
        expected, boost = self._boosts.of(request)
        if expected != request.expected_len:
            boost = self._boost(request)
            self._boosts.set(request, (request.expected_len, boost))
        return request.arrival - boost

    def _boost(self, request: Request) -> float:
        scale = self._scale or _SHARE * self._responses.mean
        return -scale * log(-expm1(-self._runtime.remaining(request) / scale))
