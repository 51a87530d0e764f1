"""Replays recordings of the engine on the simulator."""

from __future__ import annotations

import numpy as np

from jaxspec.sched.plan import Lookahead, Plan
from jaxspec.sched.scheduler import NO_DRAFTS, Scheduler
from jaxspec.sched.sim.cost import Linear
from jaxspec.sched.sim.recording import Recording
from jaxspec.sched.sim.simulator import Simulation
from jaxspec.sched.sim.workload import Workload


def workload(recording: Recording) -> Workload:
    return Workload(
        arrival=np.array([r.seen for r in recording.requests], float),
        input=np.array([r.input for r in recording.requests], int),
        output=np.array([r.output for r in recording.requests], int),
        predicted=np.array([np.nan if r.predicted is None else r.predicted for r in recording.requests], float),
        max_tokens=np.array([r.max_tokens for r in recording.requests], int),
    )


def first_served(recording: Recording) -> list[int]:
    """Requests in the order of their first step; within a step in the plan's order."""
    return list(dict.fromkeys(i for step in recording.steps for i, _, _ in step.scheduled))


def completed(recording: Recording) -> list[int]:
    """Requests in the order of completion."""
    return [i for step in recording.steps for i in step.finished]


class Replay(Simulation):
    """Replays a recorded run: arrivals, results and times are the recorded ones, the scheduler makes the plans.

    `scheduled` collects the plans in the form of `Step.scheduled`. `run` raises ValueError at the first plan that
    differs from the recorded one, because the recorded results do not apply to it.
    """

    def __init__(self, scheduler: Scheduler, recording: Recording) -> None:
        super().__init__(scheduler, workload(recording), Linear(0.0), _Rounds(recording))
        self.recording = recording
        self.scheduled: list[list[tuple[int, int, int]]] = []

    def _lookahead(self, now: float) -> Lookahead:
        step = len(self.scheduled)
        return self.recording.steps[step].lookahead if step < len(self.recording.steps) else NO_DRAFTS

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        steps, i = self.recording.steps, len(self.scheduled)
        self.scheduled.append([(int(w.request.id), w.start, w.count) for w in plan.scheduled])
        if i >= len(steps) or self.scheduled[-1] != steps[i].scheduled:
            expected = steps[i].scheduled if i < len(steps) else "no further step"
            raise ValueError(f"step {i}: planned {self.scheduled[-1]}, the recording has {expected}")
        until = steps[i + 1].begun if i + 1 < len(steps) else steps[i].ended
        return until - steps[i].begun, steps[i].service


class _Rounds:
    """Acceptance model that repeats the recorded rounds of each request."""

    def __init__(self, recording: Recording) -> None:
        self._rounds = [iter(r.rounds) for r in recording.requests]

    def round(self, request: int, produced: int, most: int) -> tuple[int, int]:
        return next(self._rounds[request])

    def share(self, request: int, most: int) -> float | None:
        return None

    def forget(self, request: int) -> None: ...
