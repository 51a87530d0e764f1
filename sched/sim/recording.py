"""Records a scheduler's inputs and plans on the real engine, to fit the simulator's models and to replay them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.sched.plan import Lookahead, Plan, RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import StepLoad

#: Recorded times are multiples of this many seconds, so sums of them are exact and so is a replay's clock.
TICK = 2.0**-20


@dataclass(slots=True)
class Step:
    """A plan with scheduled requests, which are given by their index in the recording. Times in seconds."""

    begun: float
    #: Passed to `Scheduler.plan`.
    lookahead: Lookahead
    #: (request, start, count) of each `ScheduledRequest`.
    scheduled: list[tuple[int, int, int]]
    ended: float = 0.0
    #: Seconds that counted as service.
    service: float = 0.0
    load: StepLoad = field(default_factory=lambda: StepLoad(0))
    #: Requests that finished in this step, in the plan's order.
    finished: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Seen:
    """A request. `seen`: time of the first plan after its arrival. `rounds`: (drafted, accepted) of each step in which
    it was allowed to draft."""

    seen: float
    input: int
    max_tokens: int
    output: int = 0
    predicted: float | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(slots=True)
class Recording:
    """Requests in arrival order and steps in execution order; times in seconds from the first event."""

    requests: list[Seen] = field(default_factory=list[Seen])
    steps: list[Step] = field(default_factory=list[Step])

    def traces(self) -> list[list[tuple[int, int]]]:
        """(drafted, accepted) of each request's rounds with drafts, for `acceptance.fit`."""
        return [[(drafted, accepted) for drafted, accepted in r.rounds if drafted] for r in self.requests]

    def save(self, path: str | Path) -> None:
        """Raises OSError."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """Load a file written by `save`. Raises OSError, or ValueError if it is not a recording."""
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            steps: list[Step] = []
            for row in content["steps"]:
                scheduled = [(int(i), int(start), int(count)) for i, start, count in row.pop("scheduled")]
                lookahead, load = Lookahead(**row.pop("lookahead")), StepLoad(**row.pop("load"))
                steps.append(Step(scheduled=scheduled, lookahead=lookahead, load=load, **row))
            requests: list[Seen] = []
            for row in content["requests"]:
                rounds = [(int(d), int(a)) for d, a in row.pop("rounds")]
                requests.append(Seen(rounds=rounds, **row))
            return cls(requests, steps)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"missing field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is no recording: {reason:.300}") from None


class Recorder:
    """Records a scheduler's events until `stop`. The scheduler must be idle at the start and at `stop`.

    Raises `RuntimeError` if the scheduler has work.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        if scheduler.has_work:
            raise RuntimeError("the scheduler must be idle when a recording starts")
        self.recording = Recording()
        self._scheduler = scheduler
        self._number: dict[str, int] = {}
        self._unseen: list[Seen] = []
        self._origin: float | None = None
        self._under_way: deque[tuple[Plan, Step]] = deque()
        scheduler.observers.append(self)

    def stop(self) -> Recording:
        """The recording, without steps that are still under way."""
        self._scheduler.observers.remove(self)
        if self._under_way:
            del self.recording.steps[-len(self._under_way) :]
        return self.recording

    def added(self, request: Request, now: float) -> None:
        self._number[request.id] = len(self.recording.requests)
        seen = Seen(self._time(now), request.prompt_len, request.max_tokens, predicted=request.predicted_len)
        self.recording.requests.append(seen)
        self._unseen.append(seen)

    def planned(self, plan: Plan, now: float, lookahead: Lookahead) -> None:
        begun = self._time(now)
        for seen in self._unseen:
            seen.seen = begun
        self._unseen.clear()
        if plan.scheduled:
            scheduled = [(self._number[w.request.id], w.start, w.count) for w in plan.scheduled]
            self.recording.steps.append(step := Step(begun, lookahead, scheduled))
            self._under_way.append((plan, step))

    def updating(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float) -> None:
        if not self._under_way or self._under_way[0][0] is not plan:
            return  # it schedules nothing, or was under way when the recording started
        _, step = self._under_way.popleft()
        step.ended = self._time(now)
        step.service = seconds  # not rounded to `TICK`: the replay sums the same numbers
        step.load = _load(plan, results)
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            number = self._number[scheduled.request.id]
            seen = self.recording.requests[number]
            seen.output += len(result.tokens)
            if scheduled.levels and result.tokens:
                seen.rounds.append((result.proposed, result.accepted))
            if result.finish_reason is not None:
                step.finished.append(number)

    def restarted(self) -> None:
        for _, step in self._under_way:
            self.recording.steps.remove(step)
        self._under_way.clear()

    def _time(self, now: float) -> float:
        if self._origin is None:
            self._origin = now
        return round((now - self._origin) / TICK) * TICK


def _load(plan: Plan, results: Sequence[RequestResult]) -> StepLoad:
    pairs = list(zip(plan.scheduled, results, strict=True))
    return StepLoad(
        tokens=plan.num_tokens + sum(o.proposed for o in results),
        starting=sum(w.start == 0 for w in plan.scheduled),
        context=sum(w.known - w.count for w in plan.scheduled),
        drafting=sum(o.proposed > 0 for o in results),
        levels=max((min(o.proposed, w.levels) for w, o in pairs), default=0),
    )
