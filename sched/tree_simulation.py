"""The simulation with draft trees: the engine's own `Speculator` decides what is drafted and verified."""

from __future__ import annotations

from jaxspec.sched.cost import Cost, StepLoad
from jaxspec.sched.plan import Lookahead, Plan, Work
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import NO_DRAFTS, Scheduler
from jaxspec.sched.simulated_drafter import SimulatedDrafter
from jaxspec.sched.simulator import Simulation
from jaxspec.sched.speculator import Speculator
from jaxspec.sched.trees.candidates import Draft
from jaxspec.sched.workload import Workload


class TreeSimulation(Simulation):
    """Serves `workload` as the engine does with `speculator`, whose only drafter is `drafter`; None: without drafts.

    Step times that the scheduler's configuration holds learn from each step, as on the engine. What a drafter has seen
    it keeps, also of requests that lose their pages: memory should do for all.
    """

    def __init__(
        self, scheduler: Scheduler, workload: Workload, cost: Cost, speculator: Speculator | None = None,
        drafter: SimulatedDrafter | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scheduler, workload, cost)
        if (speculator is None) != (drafter is None):
            raise ValueError("a speculator needs its drafter, and a drafter somebody who asks it")
        self.speculator, self.drafter = speculator, drafter
        #: Seconds of all the rounds of drafting.
        self.drafting = 0.0
        self._drafts: dict[str, Draft] = {}

    def _lookahead(self, now: float) -> Lookahead:
        return self.speculator.lookahead(self.scheduler.running, now) if self.speculator else NO_DRAFTS

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        drafting = 0.0
        if self.speculator and self.drafter:
            self._drafts = self.speculator.draft(plan.work, lambda _: None, plan.num_tokens, now)
            drafting, self.drafter.spent = self.drafter.spent, 0.0
            self.drafting += drafting
        tokens = plan.num_tokens + sum(len(draft) for draft in self._drafts.values())
        starting = sum(w.start == 0 for w in plan.work)
        seconds = self.cost.seconds(StepLoad(tokens, starting, sum(w.start for w in plan.work)))
        if self.scheduler.config.times:
            self.scheduler.config.times.observe(tokens, seconds)
        return drafting + seconds, drafting + seconds

    def _round(self, work: Work) -> tuple[int, int]:
        draft = self._drafts.get(work.request.id)
        if draft is None or not self.speculator or not self.drafter:
            return 0, 0
        nodes = self.drafter.accepted(work.request, draft)
        self.speculator.observe(work.request, nodes)
        return len(draft), len(nodes)

    def _forget(self, request: Request) -> None:
        if self.speculator:
            self.speculator.forget(request)
