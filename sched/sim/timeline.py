"""What each of some requests did, second by second: waiting, prefill, decoding, paused, preempted, swapped out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.waiting_reason import Obstacle, QueueState


class Phase(Enum):
    """What a request does, in words for those who see it."""

    WAITING = "waiting"
    ARRIVED = "waiting: came during a step"
    PREFILL = "prefill: computes its prompt"
    DECODE = "decode: generates tokens"
    RECOMPUTE = "recompute: computes the lost KV again"
    THROTTLED = "has a slot, skips the step"
    PAUSED = "paused: its slot went to others, its KV stays"
    PREEMPTED = "preempted: its KV pages went to others, waits"
    SWAPPED = "swapped out: its KV is in host memory"


class Span(NamedTuple):
    """A phase from `begin` to `end`, in seconds. `obstacle`: what a waiting request waits for."""

    begin: float
    end: float
    phase: Phase
    obstacle: Obstacle | None = None

    @property
    def label(self) -> str:
        """The phase, and what it waits for."""
        return f"{self.phase.value}: {self.obstacle.value}" if self.obstacle else self.phase.value


class Timeline:
    """Observes a scheduler and records the spans of the requests with these ids.

    The spans of a request follow each other without a gap from its arrival to its end. Consecutive ones differ. A
    request that arrives while a step runs waits for its end, whatever is free. Obstacles are those of the first waiting
    request: the others wait behind it.
    """

    def __init__(self, scheduler: Scheduler, ids: Collection[str]) -> None:
        self._scheduler, self._ids = scheduler, frozenset(ids)
        self._live: dict[str, tuple[Request, float, Phase, Obstacle | None]] = {}
        #: By request id, in order of arrival.
        self.spans: dict[str, list[Span]] = {}
        scheduler.observers.append(self)

    def added(self, request: Request, now: float) -> None:
        if request.id in self._ids:
            self.spans[request.id] = []
            self._live[request.id] = request, request.arrival, Phase.ARRIVED, None

    def planned(self, plan: Plan, now: float, lookahead: Lookahead) -> None:
        if not self._live:
            return
        scheduled = {s.request.id: s for s in plan.scheduled}
        queue = QueueState.of(self._scheduler)
        for name, (request, begin, before, behind) in self._live.items():
            phase = _phase(request, scheduled.get(name))
            obstacle = queue.obstacle if phase is Phase.WAITING else None
            if (phase, obstacle) != (before, behind):
                self._close(name, now)
                begin = now
            self._live[name] = request, begin, phase, obstacle

    def updating(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float) -> None:
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            name = scheduled.request.id
            if name in self._live and result.finish_reason is not None:
                self._close(name, now)
                del self._live[name]

    def restarted(self) -> None:
        """Nothing to do: the next plan says what each request does."""

    def _close(self, name: str, now: float) -> None:
        _, begin, phase, obstacle = self._live[name]
        if now == begin:
            return
        spans = self.spans[name]
        if spans and (spans[-1].phase, spans[-1].obstacle) == (phase, obstacle):  # something took no time in between
            begin = spans.pop().begin
        spans.append(Span(begin, now, phase, obstacle))


def _phase(request: Request, scheduled: ScheduledRequest | None) -> Phase:
    """What a request does after a plan."""
    if scheduled is not None:
        if scheduled.recomputes:
            return Phase.RECOMPUTE
        return Phase.DECODE if scheduled.decodes else Phase.PREFILL
    if request.status is RequestStatus.RUNNING:
        return Phase.THROTTLED
    if request.status is RequestStatus.PAUSED:
        return Phase.PAUSED
    if request.status is RequestStatus.SWAPPED:
        return Phase.SWAPPED
    return Phase.WAITING if request.recompute_until is None else Phase.PREEMPTED
