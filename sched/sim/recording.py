"""What a scheduler was told and planned on the real engine: to replay it, and to fit the simulator's models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.sched.plan import Lookahead, Plan, RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import NO_DRAFTS, Scheduler
from jaxspec.sched.sim.cost import Linear, StepLoad
from jaxspec.sched.sim.simulator import Simulation
from jaxspec.sched.sim.workload import Workload

#: Recorded points of time are multiples of this many seconds: sums of them are exact, so that a replay's clock is.
TICK = 2.0**-20


@dataclass(slots=True)
class Step:
    """A plan that held work, in the recording's own numbers of requests."""

    begun: float
    #: (drafts, levels) that the plan was allowed.
    lookahead: tuple[int, int]
    #: (request, start, count) of each piece of work.
    scheduled: list[tuple[int, int, int]]
    ended: float = 0.0
    #: What counted as service, in seconds.
    service: float = 0.0
    load: StepLoad = field(default_factory=lambda: StepLoad(0))
    #: Requests that ended with it, in the plan's order.
    finished: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """A request; `seen` is when a plan could first hold it. `rounds`: (drafted, accepted) where it might draft."""

    seen: float
    input: int
    max_tokens: int
    output: int = 0
    predicted: float | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """Requests in the order in which they came, steps in that in which they ran; times in seconds from the first."""

    requests: list[Seen] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def first_served(self) -> list[int]:
        """Requests in the order of their first step; those of one step as the plan has them."""
        return list(dict.fromkeys(i for step in self.steps for i, _, _ in step.scheduled))

    def completed(self) -> list[int]:
        """Requests in the order in which they ended."""
        return [i for step in self.steps for i in step.finished]

    def traces(self) -> list[list[tuple[int, int]]]:
        """(drafted, accepted) of each request's rounds that drafted something, for `acceptance.fit`."""
        return [[(drafted, taken) for drafted, taken in r.rounds if drafted] for r in self.requests]

    def workload(self) -> Workload:
        column = lambda values: np.array(list(values), float)  # noqa: E731
        predicted = column(np.nan if r.predicted is None else r.predicted for r in self.requests)
        lengths = (
            column(r.input for r in self.requests).astype(int),
            column(r.output for r in self.requests).astype(int),
        )
        return Workload(column(r.seen for r in self.requests), *lengths, predicted)

    def save(self, path: str | Path) -> None:
        """Raises OSError."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """What `save` wrote. Raises OSError, or ValueError where it is something else."""
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            steps = []
            for row in content["steps"]:
                scheduled = [(int(i), int(start), int(count)) for i, start, count in row.pop("scheduled")]
                levels = row.pop("lookahead")
                steps.append(
                    Step(scheduled=scheduled, lookahead=(levels[0], levels[1]), load=StepLoad(**row.pop("load")), **row)
                )
            requests = []
            for row in content["requests"]:
                rounds = [(int(d), int(a)) for d, a in row.pop("rounds")]
                requests.append(Seen(rounds=rounds, **row))
            return cls(requests, steps)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is no recording: {why}") from None


class Recorder:
    """Listens to a scheduler from now on, until `stop`; it must be idle at both times.

    It stands between the scheduler's methods and their caller: nothing in the scheduler or the engine is made for it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        if scheduler.has_work:
            raise RuntimeError("a recording begins with an idle scheduler")
        self.recording = Recording()
        self._scheduler = scheduler
        self._number: dict[str, int] = {}
        self._unseen: list[Seen] = []
        self._origin: float | None = None
        self._add, self._plan, self._update = scheduler.add, scheduler.plan, scheduler.update
        for name in ("add", "plan", "update"):
            setattr(scheduler, name, getattr(self, name))

    def stop(self) -> Recording:
        for name in ("add", "plan", "update"):
            delattr(self._scheduler, name)  # the class's own again
        return self.recording

    def add(self, request: Request, now: float) -> None:
        self._add(request, now)
        self._number[request.id] = len(self.recording.requests)
        seen = Seen(self._time(now), request.prompt_len, request.max_tokens, predicted=request.predicted_len)
        self.recording.requests.append(seen)
        self._unseen.append(seen)

    def plan(self, now: float, lookahead: Lookahead = NO_DRAFTS) -> Plan:
        plan = self._plan(now, lookahead)
        begun = self._time(now)
        for seen in self._unseen:
            seen.seen = begun
        self._unseen.clear()
        if plan.scheduled:
            scheduled = [(self._number[w.request.id], w.start, w.count) for w in plan.scheduled]
            self.recording.steps.append(Step(begun, (lookahead.drafts, lookahead.levels), scheduled))
        return plan

    def update(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float = 0.0) -> None:
        step = self.recording.steps[-1] if plan.scheduled else None
        if step is not None:
            step.ended = self._time(now)
            step.service = seconds  # as it is: the replay adds up the very same numbers
            step.load = _load(plan, results)
            for scheduled, result in zip(plan.scheduled, results, strict=True):
                number = self._number[scheduled.request.id]
                seen = self.recording.requests[number]
                seen.output += len(result.tokens)
                if scheduled.levels:
                    seen.rounds.append((result.proposed, result.accepted))
                if result.finish_reason is not None:
                    step.finished.append(number)
        self._update(plan, results, now, seconds)

    def _time(self, now: float) -> float:
        if self._origin is None:
            self._origin = now
        return round((now - self._origin) / TICK) * TICK


def _load(plan: Plan, results: Sequence[RequestResult]) -> StepLoad:
    pairs = list(zip(plan.scheduled, results, strict=True))
    return StepLoad(
        tokens=plan.num_tokens + sum(o.proposed for o in results),
        starting=sum(w.start == 0 for w in plan.scheduled),
        context=sum(w.start for w in plan.scheduled),
        drafting=sum(o.proposed > 0 for o in results),
        levels=max((min(o.proposed, w.levels) for w, o in pairs), default=0),
    )


class Replay(Simulation):
    """A recorded run on the simulator: its arrivals, answers and times, the plans being the scheduler's own.

    `scheduled` collects the plans as `Step.scheduled` has them. Raises ValueError at the first plan that was not
    recorded, because the recorded answers then belong to other requests.
    """

    def __init__(self, scheduler: Scheduler, recording: Recording) -> None:
        super().__init__(scheduler, recording.workload(), Linear(0.0), _Rounds(recording))
        self._max_tokens = [request.max_tokens for request in recording.requests]
        self.recording = recording
        self.scheduled: list[list[tuple[int, int, int]]] = []

    def _lookahead(self, now: float) -> Lookahead:
        at = len(self.scheduled)
        return Lookahead(*self.recording.steps[at].lookahead) if at < len(self.recording.steps) else NO_DRAFTS

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        steps, at = self.recording.steps, len(self.scheduled)
        self.scheduled.append([(int(w.request.id), w.start, w.count) for w in plan.scheduled])
        if at >= len(steps) or self.scheduled[-1] != steps[at].scheduled:
            expected = steps[at].scheduled if at < len(steps) else "the end"
            raise ValueError(f"step {at}: planned {self.scheduled[-1]}, the recording has {expected}")
        until = steps[at + 1].begun if at + 1 < len(steps) else steps[at].ended
        return until - steps[at].begun, steps[at].service


class _Rounds:
    """Gives each request the rounds that it had."""

    def __init__(self, recording: Recording) -> None:
        self._rounds = [iter(r.rounds) for r in recording.requests]

    def round(self, request: int, produced: int, most: int) -> tuple[int, int]:
        return next(self._rounds[request])

    def share(self, request: int, most: int) -> float | None:
        return None

    def forget(self, request: int) -> None: ...
