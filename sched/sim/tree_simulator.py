"""Simulation with draft trees: the engine's `Speculator` decides what is drafted and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxspec.sched.plan import Lookahead, Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import NO_DRAFTS, Scheduler
from jaxspec.sched.sim.cost import Cost, StepLoad
from jaxspec.sched.sim.drafter import SimulatedDrafter
from jaxspec.sched.sim.simulator import Simulation
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import NONE, Slo
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.micro_batches import Timeline, split
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.candidates import Draft


class TreeSimulation(Simulation):
    """Serves `workload` with `speculator`, whose drafters are `drafters`; None: no drafts.

    micro_batches: micro-batches of a step; None: as many as pay off. padded: verification pads all requests to the
    longest one, in tokens and in KV. Drafters keep the KV of preempted requests, so there should be enough pages for
    all requests. Raises `ValueError` if `drafters` are not those of the speculator.
    """

    def __init__(
        self, scheduler: Scheduler, workload: Workload, cost: Cost, speculator: Speculator | None = None,
        drafters: Sequence[SimulatedDrafter] = (), micro_batches: int | None = None, padded: bool = False,
        slo: Slo = NONE,
    ) -> None:  # fmt: skip
        super().__init__(scheduler, workload, cost, slo=slo)
        if [*drafters] != (speculator.drafters if speculator else []):
            raise ValueError("drafters must be the drafters of the speculator")
        self.speculator, self.drafters = speculator, drafters
        self._micro_batches, self._padded = micro_batches, padded
        #: Seconds of drafting over all drafters and steps.
        self.drafting = 0.0

    def _lookahead(self, now: float) -> Lookahead:
        return self.speculator.lookahead(self.scheduler.running, now) if self.speculator else NO_DRAFTS

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        line = self._timeline()
        parts = split(plan.scheduled, self.speculator, self._micro_batches) if self.speculator else [plan.scheduled]
        room = DraftRoom.of(plan)
        swapped = self._swapped(plan)  # counted in the first micro-batch only
        for scheduled in parts:
            drafts: dict[str, Draft] = {}
            if self.speculator:
                drafts = self.speculator.draft(scheduled, lambda _: None, room, now)
            spent = [(d.own_device, d.spent) for d in self.drafters]
            for drafter in self.drafters:
                drafter.spent = 0.0
            self.drafting += sum(seconds for _, seconds in spent)
            load = self._micro_batch_load(scheduled, drafts)
            seconds = self.cost.seconds(replace(load, swapped=swapped) if swapped else load)
            line.add(
                [s for own_device, s in spent if own_device], [s for own_device, s in spent if not own_device], seconds
            )
            if self.scheduler.config.times:
                seconds = self.cost.seconds(load) if swapped else seconds
                self.scheduler.config.times.observe(load.tokens, seconds, load.context)
            swapped = 0
        if self.speculator:
            self.speculator.precompute_kv(plan.scheduled, lambda _: None)
        return line.verified, line.verified

    def _timeline(self) -> Timeline:
        """The schedule of one step's micro-batches."""
        return Timeline()

    def _micro_batch_load(self, scheduled: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> StepLoad:
        sizes = [w.count + len(drafts.get(w.request.id, ())) for w in scheduled]
        starts = [w.start for w in scheduled]
        starting = sum(start == 0 for start in starts)
        if self._padded:
            return StepLoad(len(scheduled) * max(sizes), starting, len(scheduled) * max(starts))
        return StepLoad(sum(sizes), starting, sum(starts))

    def _round(self, scheduled: ScheduledRequest) -> tuple[int, int]:
        if not self.speculator:
            return 0, 0
        request, nodes = scheduled.request, list[int]()
        if drafted := self.speculator.drafted.get(request.id):
            nodes = [*self.drafters[drafted.parts[0].drafter].accepted(request, drafted.draft)]
        self.speculator.observe(request, nodes)
        return len(drafted.draft) if drafted else 0, len(nodes)

    def _ended(self, request: Request) -> None:
        if self.speculator:
            self.speculator.ended(request)
