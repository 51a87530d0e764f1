"""The load of a replica: its report for routing, and what autoscaling and metrics need."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxspec.engine.loop import EngineLoop
from jaxspec.engine.metrics import EngineStats
from jaxspec.outputs import RequestMetrics
from jaxspec.sched.routing import ReplicaReport, report_of

#: Seconds for which a finished request counts for the SLO attainment.
WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """A replica's answer to an ingress. `health`: of its engine."""

    report: ReplicaReport
    stats: EngineStats
    health: str = "ok"


#: The report of an engine that has failed.
NOTHING = ReplicaReport(0.0, 0, 0, 1, 0, 0.0, 1.0, 1.0)


def waiting_tokens(loop: EngineLoop) -> float:
    """Tokens of waiting requests: prompt tokens that have no KV, and output tokens that are still expected.

    To be called in the engine's thread.
    """
    waiting = [*(request for _, request in loop.scheduler.waiting.longest()), *loop.recovery.held_back]
    return sum(r.remaining_known + max(1.0, r.expected_len - r.output_len) for r in waiting)


def report(loop: EngineLoop) -> ReplicaReport:
    """The report for routers. To be called in the engine's thread; the router sets its time."""
    return report_of(loop.scheduler, 0.0, loop.counters.load.gain, loop.recovery.held_back)


class Attainment:
    """How many requests with an SLO have finished in the last `WINDOW` seconds, and how many of them within it."""

    def __init__(self) -> None:
        self._finished: deque[tuple[float, bool]] = deque()

    def observe(self, metrics: RequestMetrics, now: float) -> None:
        """A request has finished."""
        if (attained := metrics.slo_attained) is not None:
            self._finished.append((now, attained))
        while self._finished and self._finished[0][0] <= now - WINDOW:
            self._finished.popleft()

    def counts(self, now: float) -> tuple[int, int]:
        """(finished, of them within their SLO)."""
        finished = self._finished.copy()  # at once: the engine's thread may append meanwhile
        counted = [attained for time, attained in finished if time > now - WINDOW]
        return len(counted), sum(counted)
