"""SPIN's pipeline as its Fig. 6(b) shows it: micro-batches continue from step to step without a barrier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.spec.micro_batches import (
    MAX_MICRO_BATCHES,
    DrafterLoad,
    Timeline,
    committed_positions,
    drafter_load,
    shares,
)


@dataclass(slots=True)
class Flow(Timeline):
    """Each drafter drafts a micro-batch as soon as that one has been verified and the drafter is free; a micro-batch
    is verified when all drafters have finished it and the previous one is verified.

    So two micro-batches keep the target busy with one while the other is drafted, and a step takes the longer of the
    two. Times are relative to the start of the current step, which is when the last one was verified; drafting may
    start earlier. Requests are taken to keep their micro-batch from step to step: one that changes does not wait.
    """

    #: When each drafter is free, when each micro-batch was last verified, and the micro-batches added to this step.
    free: list[float] = field(default_factory=list[float])
    ready: list[float] = field(default_factory=list[float])
    part: int = 0

    def begin(self) -> Flow:
        """Start the next step: shift all times to its start."""
        self.free = [at - self.verified for at in self.free]
        self.ready = [at - self.verified for at in self.ready]
        self.verified, self.part = 0.0, 0
        return self

    def add(self, own_device: Iterable[float], target_device: Iterable[float], verifying: float) -> None:
        """As `Timeline.add`; `own_device` has one entry for each drafter, 0 if it drafts nothing."""
        if self.part == len(self.ready):
            self.ready.append(0.0)
        drafted = self.ready[self.part]
        for i, seconds in enumerate(own_device):
            if i == len(self.free):
                self.free.append(0.0)
            if seconds:
                self.free[i] = max(self.free[i], self.ready[self.part]) + seconds
                drafted = max(drafted, self.free[i])
        self.verified = max(drafted, self.verified) + verifying
        self.ready[self.part] = self.verified
        self.part += 1


#: Steps after which a pipeline's step takes its final time.
_SETTLED = 6


def settled(
    count: int, loads: Sequence[DrafterLoad], others: int, step: Callable[[int, float], float], context: float = 0.0
) -> float:
    """Seconds of a step in `count` micro-batches once the pipeline is full; arguments as in `micro_batches.seconds`.

    All drafters must have their own device.
    """
    flow = Flow()
    for _ in range(_SETTLED):
        flow.begin()
        for batch, sizes in enumerate(shares([(load.requests, True) for load in loads], count)):
            tokens = sum(n * (1 + load.drafts) for load, n in zip(loads, sizes, strict=True))
            tokens += others if batch == 0 else 0
            rounds = [load.round(n) if n else 0.0 for load, n in zip(loads, sizes, strict=True)]
            read = sum(n * load.context for load, n in zip(loads, sizes, strict=True))
            read += context if batch == 0 else 0.0
            flow.add(rounds, [], step(round(tokens), read) if tokens else 0.0)
    return flow.verified


class Flowing(TreeSimulation):
    """A simulation with this pipeline. All drafters must have their own device.

    With `micro_batches` None, each step has as many as make it shortest in a full pipeline.
    """

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        adapts = self._micro_batches is None
        if adapts:
            self._micro_batches = self._best(plan)
        try:
            return super()._time(plan, now)
        finally:
            if adapts:
                self._micro_batches = None

    def _timeline(self) -> Timeline:
        if not hasattr(self, "_flow"):
            self._flow = Flow()
        return self._flow.begin()

    def _best(self, plan: Plan) -> int:
        """The heuristic of SPIN §V-B by the profile, with the times of a pipeline that does not stop at each step."""
        speculator = self.speculator
        if speculator is None:
            return 1
        groups: dict[int | None, list[ScheduledRequest]] = {None: []}
        for s in plan.scheduled:
            drafter = speculator.proposals.drafter_of(s.request, len(plan.scheduled)) if s.levels else None
            groups.setdefault(drafter, []).append(s)
        rest = groups.pop(None)
        loads = [drafter_load(speculator, i, group) for i, group in groups.items() if i is not None]
        others = sum(s.count for s in rest)
        most = min(MAX_MICRO_BATCHES, max((load.requests for load in loads), default=1))
        times, read = speculator.step_times.of, committed_positions(rest)
        return min(range(1, most + 1), key=lambda count: settled(count, loads, others, times, read))
