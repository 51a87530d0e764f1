"""ALISE (§3.1): shortest remaining time first, in queues."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from jaxspec.sched.config import AliseSettings
from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.timing import Runtime


@dataclass(slots=True)
class _Progress:
    """A request's queue, and the output and predicted length that it was computed from."""

    output: int
    expected: float
    queue: int
    #: How often its output has reached the predicted length.
    demotions: int = 0


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

    def __init__(self, settings: AliseSettings, runtime: Runtime) -> None:
        self._runtime = runtime
        # Upper bound in remaining seconds of each queue but the last, which has none.
        self._bounds = [settings.first_threshold_ms / 1000 * settings.growth**j for j in range(settings.queues - 1)]
        self._progress: dict[str, _Progress] = {}

    def key(self, request: Request) -> Any:
        return self.queue(request)

    def queue(self, request: Request) -> int:
        """The request's queue; 0 goes first."""
        output, expected = request.output_len, request.expected_len
        p = self._progress.get(request.id)
        if p is None:
            p = self._progress[request.id] = _Progress(output, expected, self._queue_of(request))
        elif p.output != output or p.expected != expected:
            p.demotions += p.expected <= output < expected
            p.output, p.expected = output, expected
            p.queue = min(max(self._queue_of(request), p.demotions), len(self._bounds))
        return p.queue

    def forget(self, request: Request) -> None:
        self._progress.pop(request.id, None)

    def _queue_of(self, request: Request) -> int:
        return bisect_left(self._bounds, self._runtime.remaining(request))
