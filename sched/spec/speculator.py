"""The speculator: gets candidates from the drafters, selects the nodes to verify, and learns from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import Lookahead, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import need
from jaxspec.sched.slots import Need
from jaxspec.sched.spec.calibration import AcceptanceRecord, chances
from jaxspec.sched.spec.depth import USUAL_UNCACHED, DepthController, DraftTimes, widths_up_to
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.drafter import Drafted, Drafter, Proposal, SamplingOf
from jaxspec.sched.spec.micro_batches import committed_positions
from jaxspec.sched.spec.selection import select_for_slos, select_nodes
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import DEPTH, StepCandidates, TreePolicy
from jaxspec.sched.spec.trees.preorder import preorders
from jaxspec.sched.spec.trees.throughput import Throughput
from jaxspec.sched.timing import StepTimes

if TYPE_CHECKING:
    from jaxspec.sched.spec.draft_choice.choice import DraftChoice

#: A request, the drafter that drafted for it, and what that one proposed.
_Proposed = tuple[ScheduledRequest, int, Candidates]


class Speculator:
    """Runs several drafters: in each step, a request is drafted for by the one expected to be fastest for it.

    Each drafter's acceptance is learned separately. If a drafter proposes nothing for a request, the next best one
    drafts. With a draft choice (`choice`), the choice alone assigns drafters to requests and observes the results.

    A tree policy (`policy`, default `Throughput`) selects the nodes to verify. If it is `adaptive`, each drafter's
    `DepthController` picks depth, at most `levels`, and width. If no drafter drafts then, the policy may still name
    late requests to draft for, even if that slows down the others. If it is not, depth and width are the largest, with
    `by_budget` at most what AdaServe's Eq. 8 and 9 allow for a step of `verify_budget` tokens (None:
    `step.verify_budget`); its `expansion`, if it has one, bounds them too. `step` has the target's step times.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        step: StepTimes,
        policy: TreePolicy | None = None,
        levels: int | None = None,
        verify_budget: int | None = None,
        choice: DraftChoice | None = None,
    ):
        self.drafters, self.step_times, self.choice = list(drafters), step, choice
        self.policy = policy = Throughput(step) if policy is None else policy
        self._verify_budget = verify_budget
        most = policy.largest(min(levels or DEPTH, DEPTH))
        self.controllers = [
            DepthController(DraftTimes(step, d.seconds, d.own_device), most, widths_up_to(policy.max_width, d.widths))
            for d in drafters
        ]
        #: One record per drafter.
        self._records = PerRequest(lambda request: [AcceptanceRecord() for _ in self.drafters])
        # Of the current step, by request id: what was drafted; only these requests (None: all); with a draft choice,
        # the drafter assigned and the estimated seconds.
        self._drafted: dict[str, Drafted] = {}
        self._only_late: set[str] | None = None
        self._assigned: dict[str, int | None] = {}
        self._step_seconds: dict[str, float] = {}
        #: The drafter that drafted last, with a draft choice.
        self._last_drafter = PerRequest[int | None](lambda _: None)
        self._verify_seconds = step.of(1)  # of the last step
        self._context = 0  # committed positions of the step's decoding requests
        #: How often a request changed its drafter, and the seconds spent on computing its KV for the new one.
        self.switches, self.switch_seconds = 0, 0.0

    @property
    def verify_budget(self) -> int:
        """Largest step, in tokens, that is hardly slower than one of one token: AdaServe's B."""
        return self._verify_budget or self.step_times.verify_budget(self._context)

    def lookahead(self, running: Sequence[Request], now: float) -> Lookahead:
        """Begin a step: assign drafters (with a draft choice), pick each drafter's depth and width.

        Returns how deep the step that starts now may draft for its decoding requests. The nodes to verify are selected
        over all of them, so each may use all that fits.
        """
        if not self.drafters:
            return Lookahead()
        decoding = [r for r in running if r.decoding]
        self._context = sum(r.computed for r in decoding)
        for controller in self.controllers:
            controller.context = self._context / max(len(decoding), 1)
        prompts = self.policy.prompt_limit(decoding, self.verify_budget, self.step_times)
        return replace(self._decide_all(decoding, now), pooled=True, prompt_tokens=prompts)

    def _decide_all(self, decoding: Sequence[Request], now: float) -> Lookahead:
        self._only_late = None
        self._drafted.clear()
        self._step_seconds.clear()
        if self.choice:
            if not any(drafter.own_device for drafter in self.drafters):
                self.choice.share(self._verify_seconds, [c.last_round for c in self.controllers])
            assigned = self.choice.assign(decoding, self._switch_cost)
            self._assigned = {r.id: i for r, i in zip(decoding, assigned, strict=True)}
        if not decoding:
            return Lookahead()
        if not self.policy.adaptive:
            budget = self.verify_budget if self.policy.by_budget else None
            return Lookahead.deepest(
                controller.largest(len(decoding), budget) if self._served(i, decoding) else controller.off()
                for i, controller in enumerate(self.controllers)
            )
        lookahead = Lookahead.deepest(self._decide(i, decoding) for i in range(len(self.drafters)))
        if Need.SLOS not in self.policy.needs:
            return lookahead
        return self._deepen(decoding, now) if lookahead.levels else self._draft_for_late(decoding, now)

    def _served(self, drafter: int, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of the requests that the drafter may draft for."""
        if not self.drafters[drafter].ready:
            return []
        return [r for r in requests if self._assigned.get(r.id) == drafter] if self.choice else requests

    def _switch_cost(self, request: Request, drafter: int) -> float:
        """Seconds in which the drafter computes the KV of the request's uncached tokens."""
        d = self.drafters[drafter]
        return max(
            0.0, d.seconds(1, d.uncached_tokens(request), 1, d.widths[0]) - d.seconds(1, USUAL_UNCACHED, 1, d.widths[0])
        )

    def _decide(self, drafter: int, decoding: Sequence[Request]) -> Lookahead:
        controller, served = self.controllers[drafter], self._served(drafter, decoding)
        if not served:
            return controller.off()
        if controller.keeps_off(len(served)):
            return Lookahead()
        lookahead = controller.decide(
            len(served), *self._uncached_and_records(drafter, served), len(decoding) - len(served)
        )
        if controller.probing:
            controller.probed = min(served, key=self.drafters[drafter].uncached_tokens).id
        return lookahead

    def _uncached_and_records(self, drafter: int, requests: Sequence[Request]) -> tuple[int, list[AcceptanceRecord]]:
        uncached_tokens = self.drafters[drafter].uncached_tokens
        return sum(uncached_tokens(r) for r in requests), [self._record(r, drafter) for r in requests]

    def _deepen(self, decoding: Sequence[Request], now: float) -> Lookahead:
        """Draft as deep as requests need for their SLOs, where that is deeper than throughput wants."""
        for i, controller in enumerate(self.controllers):
            if controller.levels and not controller.probing:
                served = self._served(i, decoding)
                controller.deepen(
                    *self._uncached_and_records(i, served), partial(_needs, served, now), len(decoding) - len(served)
                )
        return Lookahead.deepest(c.lookahead for c in self.controllers)

    def _draft_for_late(self, decoding: Sequence[Request], now: float) -> Lookahead:
        """Draft only for the policy's late requests, where that helps them."""
        max_nodes = max(0, self.verify_budget - len(decoding))
        plain = self.step_times.of(len(decoding), self._context)
        if not (late := self.policy.late(decoding, now, plain, max_nodes)):
            return Lookahead()
        self._only_late = {r.id for r in late}
        for i, controller in enumerate(self.controllers):
            controller.off()
            if served := self._served(i, late):
                controller.decide_for_late(len(decoding), *self._uncached_and_records(i, served), max_nodes)
        return Lookahead.deepest(c.lookahead for c in self.controllers)

    def _record(self, request: Request, drafter: int) -> AcceptanceRecord:
        return self._records.of(request)[drafter]

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before the step's first launch: drafters on other devices fetch the features they may need in this step."""
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device:
                wanted = [s for s in scheduled if s.levels and i in self._possible_drafters(s.request)]
                if wanted:
                    drafter.prefetch_features(wanted)

    def _possible_drafters(self, request: Request) -> tuple[int | None, ...]:
        """The drafters that may draft or precompute KV for the request in this step."""
        if not self.choice:
            return tuple(range(len(self.drafters)))
        return self._assigned.get(request.id), self.choice.ahead(request)

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """While the target verifies: idle drafters compute KV of requests likely to change to them (SPIN §IV-C)."""
        if not self.choice:
            return
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device:
                coming = [
                    s
                    for s in scheduled
                    if s.levels and self._assigned.get(s.request.id) != i == self.choice.ahead(s.request)
                ]
                if coming:
                    drafter.precompute_kv(coming, sampling)

    def draft(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, room: DraftRoom, now: float,
        allowed: Callable[[Request, Candidates], Candidates] = lambda request, candidates: candidates,
    ) -> dict[str, Draft]:  # fmt: skip
        """Draft trees by request id, for those requests of a micro-batch that get one.

        `room`: what the step, which started at `now`, has left for drafts; takes what the micro-batch selects.
        `allowed`: the candidates without those that the request's constraint forbids.
        """
        if not self.drafters:
            return {}
        sharing = sum(s.levels > 0 for s in scheduled)
        budget = room.share(self.policy.within(self.verify_budget - room.known_tokens), sharing)
        nodes = room.share(room.nodes, sharing)
        draftable = [s for s in scheduled if s.levels and (self._only_late is None or s.request.id in self._only_late)]
        if self.policy.by_budget and budget <= 0 and draftable and Need.SLOS in self.policy.needs:
            # Prompts make this step long anyway: late requests draft as if there were none.
            budget = room.share(self.verify_budget - room.requests, sharing)
            seconds = self.step_times.of(room.known_tokens + room.drafted, room.context)
            late = {r.id for r in self.policy.late([s.request for s in draftable], now, seconds, max(0, budget))}
            draftable = [s for s in draftable if s.request.id in late]
        if (min(nodes, budget) if self.policy.by_budget else nodes) <= 0:
            draftable = []  # no node would be selected
        proposed = self._propose(draftable, sampling, nodes) if draftable else []
        drafts: dict[str, Draft] = {}
        if proposed:
            proposed = [(s, i, allowed(s.request, c)) for s, i, c in proposed]
            forest = Forest([c for _, _, c in proposed])
            masks = self._select(scheduled, proposed, forest, room, nodes, budget, now)
            for (s, i, c), mask, draft in zip(proposed, masks, preorders(forest, masks), strict=True):
                if len(draft):
                    self._drafted[s.request.id] = Drafted(i, c, mask, draft)
                    drafts[s.request.id] = draft
        nodes = sum(map(len, drafts.values()))
        room.take(sharing, nodes)
        if self.choice:
            self._estimate_step_seconds(scheduled, proposed, nodes)
        return drafts

    def _estimate_step_seconds(
        self, scheduled: Sequence[ScheduledRequest], proposed: Sequence[_Proposed], nodes: int
    ) -> None:
        """Estimate the seconds of this step, with `nodes` drafts, for each request that has a drafter assigned.

        Estimated, not measured, so that a pause of the machine is not charged to a drafter. Computing KV after a change
        of drafter is not included: it is part of the switch cost. A round on the target's device delays all requests,
        one on a drafter's own device only those it drafts for.
        """
        drafted, rounds = {s.request.id: i for s, i, _ in proposed}, self._round_seconds(proposed)
        tokens = sum(s.count for s in scheduled) + nodes
        self._verify_seconds = self.step_times.of(tokens, committed_positions(scheduled))
        common = self._verify_seconds + sum(t for i, t in rounds.items() if not self.drafters[i].own_device)
        for s in scheduled:
            if (name := s.request.id) in self._assigned:
                own_device = name in drafted and self.drafters[drafted[name]].own_device
                self._step_seconds[name] = common + (rounds[drafted[name]] if own_device else 0.0)

    def _round_seconds(self, proposed: Sequence[_Proposed]) -> dict[int, float]:
        """Seconds of the rounds that proposed these, by drafter."""
        return {i: self.controllers[i].usual_round(n) for i, n in Counter(i for _, i, _ in proposed).items()}

    def _select(
        self, scheduled: Sequence[ScheduledRequest], proposed: Sequence[_Proposed], forest: Forest, room: DraftRoom,
        nodes: int, budget: int, now: float,
    ) -> list[npt.NDArray[np.bool_]]:  # fmt: skip
        """The nodes to verify in a micro-batch, one mask per tree.

        `nodes`, `budget`: its share of the room and of the verify budget.
        """
        if self.policy.calibrated:
            records = [self._record(s.request, i) for s, i, _ in proposed]
            calibrations = [self.controllers[i].calibration for _, i, _ in proposed]
            forest = forest.calibrated(chances(forest, calibrations, records))
        limits = [min(s.drafts, len(c)) for s, _, c in proposed]
        tokens, read = sum(s.count for s in scheduled), committed_positions(scheduled)
        step = StepCandidates(forest, limits, nodes, budget, [-inf] * len(proposed), tokens, read)
        probing = [tree for tree, (_, i, _) in enumerate(proposed) if self.controllers[i].probing]
        if Need.SLOS not in self.policy.needs:
            return select_nodes(self.policy, step, probing)
        rounds = self._round_seconds(proposed)
        own_device = [seconds for i, seconds in rounds.items() if self.drafters[i].own_device]
        drafting = sum(rounds.values()) - sum(own_device) + max(own_device, default=0.0)
        others = room.known_tokens + room.drafted  # of the whole step; later micro-batches' drafts are not known
        return select_for_slos(
            self.policy, step, probing, lambda nodes: drafting + self.step_times.of(others + nodes, room.context),
            partial(_needs, [s.request for s, _, _ in proposed], now),
        )  # fmt: skip

    def _propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, room: int) -> list[_Proposed]:
        """One proposal for each request that some drafter has candidates for; the cheapest drafters draft first.

        `room`: draft nodes that fit. A round whose requests get even shares of it drafts no levels beyond those, unless
        they are free.
        """
        preferred = {s.request.id: self._preferences(s.request, len(scheduled)) for s in scheduled}
        proposed: list[_Proposed] = []

        def collect(i: int, batch: Sequence[ScheduledRequest], levels: int, proposal: Proposal) -> None:
            for s, c in zip(batch, proposal(), strict=True):
                if c is None or not len(c):
                    preferred[s.request.id].remove(i)
                    continue
                proposed.append((s, i, c.truncated(s.levels) if s.levels < levels else c))
                preferred[s.request.id].clear()

        order = sorted((i for i, drafter in enumerate(self.drafters) if drafter.ready), key=self._base_cost)
        started: dict[int, tuple[Sequence[ScheduledRequest], int, Proposal]] = {}
        # The second pass is for requests that a more expensive drafter had no candidates for.
        for i in (*order, *order):
            controller = self.controllers[i]
            batch = [s for s in scheduled if preferred[s.request.id][:1] == [i]]
            if not batch or i in started:  # one round a step
                continue
            levels = min(controller.levels, max(s.levels for s in batch))
            share = max(1, room // len(batch))
            if not self.policy.shares_room and share < levels:
                seconds = [self.drafters[i].seconds(len(batch), 0, n, controller.width) for n in (share, levels)]
                levels = share if seconds[0] < seconds[1] else levels
            if self.choice:
                self._count_switches(i, batch)
            started[i] = batch, levels, self.drafters[i].propose(batch, sampling, levels, controller.width)
            if not self._runs_concurrently(i):
                collect(i, *started[i])
        for i, proposal in started.items():
            if self._runs_concurrently(i):
                collect(i, *proposal)
        return proposed

    def _base_cost(self, drafter: int) -> float:
        """Seconds of the drafter's smallest round."""
        return self.drafters[drafter].seconds(1, 0, 1, self.drafters[drafter].widths[0])

    def _runs_concurrently(self, drafter: int) -> bool:
        """Whether other drafters run meanwhile: it has its own device, and no other drafter takes what it leaves."""
        return self.choice is not None and self.drafters[drafter].own_device

    def drafter_of(self, request: Request, requests: int) -> int | None:
        """Index of the drafter for this request in this step, with `requests` requests in the step; None: none."""
        return next(iter(self._preferences(request, requests)), None)

    def drafted_by(self, request: Request) -> int | None:
        """Index of the drafter whose tree is verified for this request in this step; None: no tree."""
        drafted = self._drafted.get(request.id)
        return None if drafted is None else drafted.drafter

    def _count_switches(self, drafter: int, scheduled: Sequence[ScheduledRequest]) -> None:
        for s in scheduled:
            if self._last_drafter.of(s.request) not in (None, drafter):
                self.switches += 1
                self.switch_seconds += self._switch_cost(s.request, drafter)
            self._last_drafter.set(s.request, drafter)

    def _preferences(self, request: Request, requests: int) -> list[int]:
        """Drafters that draft in this step, best first: those that probe, then by expected speed for this request.

        Ties keep the configured order. With a draft choice: only the assigned one.
        """
        active = [i for i, c in enumerate(self.controllers) if c.drafts_for(request.id)]
        if self.choice:
            return [i for i in active if i == self._assigned.get(request.id)]
        if len(active) < 2:
            return active
        speed = {i: self.controllers[i].speed(requests, self._record(request, i)) for i in active}
        return sorted(active, key=lambda i: (not self.controllers[i].probing, -speed[i]))

    def observe(self, request: Request, nodes: Sequence[int]) -> None:
        """Learn from the step's result for one scheduled request.

        `nodes` are the accepted nodes of its draft tree (indices in preorder, along the accepted path); empty if it had
        no tree.
        """
        if not self.drafters:
            return
        seconds = self._step_seconds.pop(request.id, None)
        if self.choice and seconds is not None:
            self.choice.observe(request, self._assigned[request.id], 1 + len(nodes), seconds)
        if drafted := self._drafted.get(request.id):
            accepted = [int(drafted.draft.source[n]) for n in nodes]
            record = self._record(request, drafted.drafter)
            self.controllers[drafted.drafter].observe(drafted.candidates, drafted.chosen, accepted, record)

    def ended(self, request: Request) -> None:
        """The request has finished or was cancelled."""
        for learner in (*self.drafters, *filter(None, [self.choice])):
            learner.ended(request)


def _needs(requests: Sequence[Request], now: float, seconds: float) -> list[float]:
    """Tokens that each request needs from a step of this length."""
    return [need(r, now, seconds) for r in requests]
