"""A draft choice at work: which drafter each request has, what changes of drafter cost, and what the choice learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.depth import USUAL_UNCACHED
from jaxspec.sched.spec.draft_choice.choice import DraftChoice
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.micro_batches import committed_positions
from jaxspec.sched.timing import StepTimes

#: Weight of a slot in the usual seconds that verifying a drafter's drafts adds to a step.
_WEIGHT = 0.02


class Assignment:
    """The drafters that a draft choice (SPIN §IV) assigned to the decoding requests of the current step."""

    def __init__(self, choice: DraftChoice, drafters: Sequence[Drafter], times: StepTimes) -> None:
        self.choice, self._drafters, self._times = choice, drafters, times
        #: How often a request changed its drafter, and the seconds spent on computing its KV for the new one.
        self.switches, self.switch_seconds = 0, 0.0
        # By drafter: usual seconds that verifying its drafts adds to a step, per request, and of how many slots.
        self._verify, self._slots = [0.0] * len(drafters), [0] * len(drafters)
        # Of the current step, by request id: the assigned drafter, and the estimated seconds.
        self._assigned: dict[str, int | None] = {}
        self._seconds: dict[str, float] = {}
        self._last = PerRequest[int | None](lambda _: None)

    def begin(self, decoding: Sequence[Request], rounds: Sequence[float]) -> None:
        """Assign drafters for a step. `rounds`: seconds of each drafter's last round."""
        self._seconds.clear()
        if not any(drafter.own_device for drafter in self._drafters):
            step = self._times.of(max(1, len(decoding)), sum(r.computed for r in decoding))
            self.choice.share(step, rounds, self._verify)
        assigned = self.choice.assign(decoding, self.switch_cost)
        self._assigned = {r.id: i for r, i in zip(decoding, assigned, strict=True)}

    def switch_cost(self, request: Request, drafter: int) -> float:
        """Seconds in which the drafter computes the KV of the request's uncached tokens."""
        d = self._drafters[drafter]
        usual = d.seconds(1, USUAL_UNCACHED, 1, d.widths[0])
        return max(0.0, d.seconds(1, d.uncached_tokens(request), 1, d.widths[0]) - usual)

    def of(self, request: Request) -> int | None:
        """The drafter assigned to the request; None: none."""
        return self._assigned.get(request.id)

    def possible(self, request: Request) -> tuple[int | None, ...]:
        """The drafters that may draft or precompute KV for the request in this step."""
        return self.of(request), self.choice.ahead(request)

    def precomputes(self, request: Request, drafter: int) -> bool:
        """Whether the drafter may compute the request's KV ahead: the request is likely to change to it."""
        return self.of(request) != drafter == self.choice.ahead(request)

    def count_switches(self, drafter: int, scheduled: Sequence[ScheduledRequest]) -> None:
        """The drafter is about to draft for these requests."""
        for s in scheduled:
            if self._last.of(s.request) not in (None, drafter):
                self.switches += 1
                self.switch_seconds += self.switch_cost(s.request, drafter)
            self._last.set(s.request, drafter)

    def estimate(
        self, scheduled: Sequence[ScheduledRequest], drafted: Mapping[str, int], rounds: Mapping[int, float],
        nodes: Mapping[str, int],
    ) -> None:  # fmt: skip
        """Estimate the seconds of this step for each request that has a drafter assigned.

        Estimated, not measured, so that a pause of the machine is not charged to a drafter. By request id, `drafted` is
        the drafter that drafted and `nodes` the number of draft nodes to verify; `rounds`: seconds of the drafters'
        rounds. Computing KV after a change of drafter is not included: it is part of the switch cost. A round on the
        target's device delays all requests, one on a drafter's own device only those it drafts for.
        """
        total, tokens, read = sum(nodes.values()), sum(s.count for s in scheduled), committed_positions(scheduled)
        verify_seconds = self._times.of(tokens + total, read)
        per_node = (verify_seconds - self._times.of(tokens, read)) / max(1, total)
        common = verify_seconds + sum(t for i, t in rounds.items() if not self._drafters[i].own_device)
        for s in scheduled:
            if (name := s.request.id) in self._assigned:
                if (assigned := self._assigned[name]) is not None:
                    self._slots[assigned] += 1
                    weight = max(_WEIGHT, 1 / self._slots[assigned])
                    self._verify[assigned] += weight * (nodes.get(name, 0) * per_node - self._verify[assigned])
                own_device = name in drafted and self._drafters[drafted[name]].own_device
                self._seconds[name] = common + (rounds[drafted[name]] if own_device else 0.0)

    def observe(self, request: Request, tokens: int) -> None:
        """The step gave the request `tokens` tokens. The choice learns of one step only once."""
        if (seconds := self._seconds.pop(request.id, None)) is not None:
            self.choice.observe(request, self._assigned[request.id], tokens, seconds)
