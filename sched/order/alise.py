"""Shortest remaining time first, in queues: ALISE (§3.1)."""

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
    """Where one request stands, by its output and prediction at that time."""

    output: int
    expected: float
    queue: int
    #: How often it has outlived its prediction.
    demotions: int = 0


class Alise(Order):
    """Queues by the remaining execution time that the runtime model expects, each holding `growth` times as much as the
    one above it; within one, first come, first served, and no preemption. A running request moves up as it comes nearer
    to its end. One that outlives its prediction is demoted: the doubled prediction says how far, and it never enters
    the queue again that it outlived it in: after n demotions the first n are closed to it.

    The model learns on, so a request's place is found when its output or prediction changes and then stands: what waits
    keeps its key. Virtual aging is the scheduler's (`aging_ms`), which promotes above all queues.
    """

    preemptive = True

    def __init__(self, settings: AliseSettings, runtime: Runtime) -> None:
        self._runtime = runtime
        # Most remaining seconds of each queue but the last, which has no end.
        self._up = [settings.first_threshold_ms / 1000 * settings.growth**j for j in range(settings.queues - 1)]
        self._progress: dict[str, _Progress] = {}

    def key(self, request: Request) -> Any:
        return self.queue(request)

    def queue(self, request: Request) -> int:
        """0 is served first."""
        output, expected = request.output_len, request.expected_len
        p = self._progress.get(request.id)
        if p is None:
            p = self._progress[request.id] = _Progress(output, expected, self._place(request))
        elif p.output != output or p.expected != expected:
            p.demotions += p.expected <= output < expected
            p.output, p.expected = output, expected
            p.queue = min(max(self._place(request), p.demotions), len(self._up))
        return p.queue

    def forget(self, request: Request) -> None:
        self._progress.pop(request.id, None)

    def _place(self, request: Request) -> int:
        return bisect_left(self._up, self._runtime.remaining(request))
