"""ALISE (§3.1): shortest remaining time first, in queues."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from pydantic import Field, PositiveFloat

from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext
from jaxspec.sched.timing import Runtime


class AliseSettings(Section):
    """`order: alise`: priority queues by estimated remaining execution time (ALISE §3.1). Its aging is `aging_ms`."""

    #: Number of priority queues.
    queues: int = Field(default=16, ge=1, le=64)
    #: Longest estimated remaining time, in ms, of requests in the first queue.
    first_threshold_ms: PositiveFloat = 500.0
    #: Upper time bound of a queue relative to that of the queue above it.
    growth: float = Field(default=1.5, gt=1, le=100)


@dataclass(slots=True)
class _Progress:
    """A request's queue, and the output and predicted length that it was computed from."""

    output: int
    expected: float
    queue: int
    #: How often its output has reached the predicted length.
    demotions: int = 0


@ORDERS.register("alise", AliseSettings)
class Alise(Order):
    """Queues by estimated remaining execution time; the range of each is `growth` times that of the one above it.

    Within a queue requests go first come, first served, and do not preempt each other. A running request moves up as it
    nears its end. When it exceeds its predicted length, the prediction is doubled and the request is demoted to the
    queue of the new estimate; after n demotions it can no longer enter the first n queues.

    The runtime model keeps learning, so a request's queue is computed only when its output or prediction changes: a
    waiting request keeps its key. ALISE's virtual aging is the scheduler's (`aging_ms`), which promotes a request above
    all queues.
    """

    preemptive = True
    rule = "requests with less estimated time left go first"
    needs = frozenset({Need.LENGTHS, Need.RUNTIME})

    def __init__(self, settings: AliseSettings, runtime: Runtime) -> None:
        self._runtime = runtime
        # Upper bound in remaining seconds of each queue but the last, which has none.
        self._bounds = [settings.first_threshold_ms / 1000 * settings.growth**j for j in range(settings.queues - 1)]
        self._progress = PerRequest(lambda r: _Progress(r.output_len, r.expected_len, self._queue_of(r)))

    @classmethod
    def build(cls, settings: AliseSettings, context: SlotContext) -> Alise:
        assert context.runtime is not None
        return cls(settings, context.runtime)

    def key(self, request: Request) -> Any:
        return self.queue(request)

    def queue(self, request: Request) -> int:
        """The request's queue; 0 goes first."""
        p, output, expected = self._progress.of(request), request.output_len, request.expected_len
        if p.output != output or p.expected != expected:
            p.demotions += p.expected <= output < expected
            p.output, p.expected = output, expected
            p.queue = min(max(self._queue_of(request), p.demotions), len(self._bounds))
        return p.queue

    def _queue_of(self, request: Request) -> int:
        return bisect_left(self._bounds, self._runtime.remaining(request))
