"""The speculator: gets candidates from the drafters, selects the nodes to verify, and learns from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import Lookahead, Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import need
from jaxspec.sched.slots import Need
from jaxspec.sched.spec.ahead import AheadDrafting, AheadDrafts
from jaxspec.sched.spec.assignment import Assignment
from jaxspec.sched.spec.calibration import AcceptanceRecord, chances
from jaxspec.sched.spec.depth import DepthController, DraftTimes, widths_up_to
from jaxspec.sched.spec.draft_choice.choice import DraftChoice
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.drafter import Drafter, DrafterFailed, FailedDrafter, Proposed, SamplingOf
from jaxspec.sched.spec.host_times import DRAFTED, PLAIN, UNUSED, HostTimes, StepTook
from jaxspec.sched.spec.merging import Drafted, RequestTree, by_request
from jaxspec.sched.spec.micro_batches import committed_positions
from jaxspec.sched.spec.payoff import Payoff
from jaxspec.sched.spec.proposals import Proposals
from jaxspec.sched.spec.selection import select_for_slos, select_nodes
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import DEPTH, StepCandidates, TreePolicy
from jaxspec.sched.spec.trees.preorder import preorders
from jaxspec.sched.spec.trees.throughput import Throughput
from jaxspec.sched.timing import StepTimes

#: Failed rounds in a row after which a drafter drafts no more.
MOST_FAILURES = 3


class StepTerms(NamedTuple):
    """What the speculator decided for a step: what it is judged by, and the seconds of its draft rounds. A round that
    went ahead is part of the step's own time."""

    payoff: Payoff | None
    rounds: float


class Speculator:
    """Merges what drafters propose for a request, and selects the nodes to verify over all requests.

    `Proposals` says who drafts for whom. Each drafter's acceptance is learned separately. With a draft choice
    (`choice`), the choice alone assigns drafters to requests and observes the results.

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
        self.drafters, self.step_times = list(drafters), step
        self.policy = policy = Throughput(step) if policy is None else policy
        self._verify_budget = verify_budget
        most = policy.largest(min(levels or DEPTH, DEPTH))
        self.controllers = [
            DepthController(DraftTimes(step, d.seconds, d.own_device), most, widths_up_to(policy.max_width, d.widths))
            for d in drafters
        ]
        #: One record per drafter.
        self._records = PerRequest(lambda request: [AcceptanceRecord() for _ in self.drafters])
        #: The drafts of requests whose step has not been observed, by request id.
        self.drafted: dict[str, Drafted] = {}
        self._context = 0  # committed positions of the step's decoding requests
        self._budget: int | None = None  # profiled for this step
        self._rounds = 0.0  # seconds of the step's rounds
        self._failures = Counter[tuple[int, str]]()  # see `Proposals`
        self.host = HostTimes()
        #: By the number of decoding requests, rounded up to a power of two.
        self._payoffs: dict[int, Payoff] = {}
        self._payoff: Payoff | None = None  # of the step, if it depends on it whether drafts are allowed
        self.assign_by(choice)

    def assign_by(self, choice: DraftChoice | None) -> None:
        """Let `choice` assign drafters to requests; None: no draft choice."""
        #: What the draft choice assigned; None without one.
        self.assignment = None if choice is None else Assignment(choice, self.drafters, self.step_times)
        self.proposals = Proposals(
            self.drafters, self.controllers, self.policy, self.assignment, self._record, self._failures
        )
        #: For steps that are launched before the host has read their drafts.
        self.ahead = AheadDrafting(self.drafters, self.controllers, self.policy, self.assignment, self.proposals)

    @property
    def steps_off(self) -> int:
        """Steps without drafts because drafts had lost time."""
        return sum(payoff.skipped for payoff in [*self._payoffs.values()])

    @property
    def choice(self) -> DraftChoice | None:
        """The draft choice."""
        return None if self.assignment is None else self.assignment.choice

    @property
    def switches(self) -> tuple[int, float]:
        """How often requests changed their drafter, and the seconds spent on computing their KV for the new one."""
        return (0, 0.0) if self.assignment is None else (self.assignment.switches, self.assignment.switch_seconds)

    @property
    def verify_budget(self) -> int:
        """Largest step, in tokens, that is hardly slower than one of one token: AdaServe's B."""
        if self._budget is None:
            self._budget = self._verify_budget or self.step_times.verify_budget(self._context)
        return self._budget

    def lookahead(self, running: Sequence[Request], now: float) -> Lookahead:
        """Begin a step: assign drafters (with a draft choice), pick each drafter's depth and width.

        Returns how deep the step that starts now may draft for its decoding requests. The nodes to verify are selected
        over all of them, so each may use all that fits.
        """
        if not self.drafters:
            return Lookahead()
        decoding = [r for r in running if r.decoding]
        self._context, self._budget, self._rounds = sum(r.computed for r in decoding), None, 0.0
        for controller in self.controllers:
            controller.context, controller.overhead = self._context / max(len(decoding), 1), self.host.overhead(PLAIN)
        prompts = None
        if self.policy.prompts_in_budget:
            prompts = self.policy.prompt_limit(decoding, self.verify_budget, self.step_times)
        return replace(self._decide_all(decoding, now), pooled=True, prompt_tokens=prompts)

    def _decide_all(self, decoding: Sequence[Request], now: float) -> Lookahead:
        if self.assignment:
            self.assignment.begin(decoding, [c.last_round for c in self.controllers])
        self._payoff = self._payoff_of(decoding)
        if not decoding or (self._payoff is not None and not self._payoff.allows()):
            self._payoff = None
            for controller in self.controllers:
                controller.off()
            return Lookahead()
        if not self.policy.adaptive:
            budget = self.verify_budget if self.policy.by_budget else None
            return Lookahead.deepest(
                controller.largest(len(decoding), budget) if self._served(i, decoding) else controller.off()
                for i, controller in enumerate(self.controllers)
            )
        ids = [r.id for r in decoding]
        free = [self._decide_free(i, decoding, ids) for i in self.proposals.free]
        others = Lookahead.deepest(self._decide(i, decoding) for i in self.proposals.others)
        if Need.SLOS in self.policy.needs:
            others = self._deepen(decoding, now) if others.levels else self._draft_for_late(decoding, now)
        drafts = sum(lookahead.drafts for lookahead in (*free, others))
        most = self.policy.largest(DEPTH).drafts
        return replace(Lookahead.deepest([*free, others]), drafts=min(most, drafts))

    def _decide_free(self, drafter: int, decoding: Sequence[Request], ids: Sequence[str]) -> Lookahead:
        controller = self.controllers[drafter]
        if not any(map(self.drafters[drafter].serves, decoding)):
            return controller.off()
        return controller.decide_free(ids)

    def _payoff_of(self, decoding: Sequence[Request]) -> Payoff | None:
        """What decides whether a step of these requests may draft; None unless only speed decides."""
        slos = Need.SLOS in self.policy.needs and any(r.slo for r in decoding)
        if not decoding or not self.policy.adaptive or slos or self.assignment:
            return None
        return self._payoffs.setdefault(1 << (len(decoding) - 1).bit_length(), Payoff())

    def _served(self, drafter: int, requests: Sequence[Request]) -> Sequence[Request]:
        """The requests that this drafter may draft for."""
        if not self.drafters[drafter].ready:
            return []
        return [r for r in requests if self.assignment.of(r) == drafter] if self.assignment else requests

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
            controller.only = {min(served, key=self.drafters[drafter].uncached_tokens).id}
        return lookahead

    def _uncached_and_records(self, drafter: int, requests: Sequence[Request]) -> tuple[int, list[AcceptanceRecord]]:
        uncached_tokens = self.drafters[drafter].uncached_tokens
        return sum(uncached_tokens(r) for r in requests), [self._record(r, drafter) for r in requests]

    def _deepen(self, decoding: Sequence[Request], now: float) -> Lookahead:
        """Draft as deep as requests need for their SLOs, where that is deeper than throughput wants."""
        others = self.proposals.others
        for i in others:
            if (controller := self.controllers[i]).levels and not controller.probing:
                served = self._served(i, decoding)
                controller.deepen(
                    *self._uncached_and_records(i, served), partial(_needs, served, now), len(decoding) - len(served)
                )
        return Lookahead.deepest(self.controllers[i].lookahead for i in others)

    def _draft_for_late(self, decoding: Sequence[Request], now: float) -> Lookahead:
        """Let the drafters that do not pay draft only for the policy's late requests, where that helps them."""
        max_nodes = max(0, self.verify_budget - len(decoding))
        plain = self.step_times.of(len(decoding), self._context)
        if not (late := self.policy.late(decoding, now, plain, max_nodes)):
            return Lookahead()
        off = [(i, c) for i, c in enumerate(self.controllers) if not c.levels]
        for i, controller in off:
            controller.off()
            if served := self._served(i, late):
                controller.decide_for_late(len(decoding), *self._uncached_and_records(i, served), max_nodes)
                controller.only = {r.id for r in late}
        return Lookahead.deepest(c.lookahead for _, c in off)

    def _record(self, request: Request, drafter: int) -> AcceptanceRecord:
        return self._records.of(request)[drafter]

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before the step's first launch: drafters on other devices fetch the features they may need in this step."""
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device and (wanted := [s for s in scheduled if s.levels and self._may_draft(i, s.request)]):
                with self.proposals.blaming(i, "prefetching features"):
                    drafter.prefetch_features(wanted)

    def _may_draft(self, drafter: int, request: Request) -> bool:
        """Whether the drafter may draft or precompute KV for the request in this step."""
        return self.assignment is None or drafter in self.assignment.possible(request)

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """While the target verifies: idle drafters compute KV of requests likely to change to them (SPIN §IV-C)."""
        if not self.assignment:
            return
        precomputes = self.assignment.precomputes
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device and (coming := [s for s in scheduled if s.levels and precomputes(s.request, i)]):
                with self.proposals.blaming(i, "precomputing KV"):
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
        for s in scheduled:
            self.drafted.pop(s.request.id, None)
        sharing, by_budget = sum(s.levels > 0 for s in scheduled), self.policy.by_budget
        budget = 0
        if by_budget or self.policy.shares_nodes:
            budget = room.share(self.policy.within(self.verify_budget - room.known_tokens), sharing)
        nodes = room.share(room.nodes, sharing)
        draftable = [s for s in scheduled if s.levels and any(c.drafts_for(s.request.id) for c in self.controllers)]
        if by_budget and budget <= 0 and draftable and Need.SLOS in self.policy.needs:
            # Prompts make this step long anyway: late requests draft as if there were none.
            budget = room.share(self.verify_budget - room.requests, sharing)
            seconds = self.step_times.of(room.known_tokens + room.drafted, room.context)
            late = {r.id for r in self.policy.late([s.request for s in draftable], now, seconds, max(0, budget))}
            draftable = [s for s in draftable if s.request.id in late]
        if (min(nodes, budget) if by_budget else nodes) <= 0:
            draftable = []  # no node would be selected
        proposed = self.proposals.propose(draftable, sampling, nodes) if draftable else []
        rounds, drafts = self._round_seconds(proposed), dict[str, Draft]()
        if proposed:
            for p in proposed if self._failures else ():
                self.proposals.succeeded(p.drafter)
            proposed = [p._replace(candidates=allowed(p.scheduled.request, p.candidates)) for p in proposed]
            trees, forest = by_request(proposed, self._forest(proposed))
            self._rounds += sum(rounds.values())
            masks = self._select(scheduled, trees, forest, rounds, room, nodes, budget, now)
            used = set[int]()
            for tree, mask, draft in zip(trees, masks, preorders(forest, masks), strict=True):
                if len(draft):
                    name = tree.scheduled.request.id
                    self.drafted[name], drafts[name] = Drafted(tree.parts, mask, draft), draft
                    used |= {part.drafter for part in tree.parts if mask[part.node].any()}
            for i in rounds:
                self.controllers[i].count_round(i in used)
        nodes = sum(map(len, drafts.values()))
        room.take(sharing, nodes)
        if self.assignment:
            drafted = {p.scheduled.request.id: p.drafter for p in proposed}
            self.assignment.estimate(scheduled, drafted, rounds, {name: len(draft) for name, draft in drafts.items()})
        return drafts

    def read_ahead(self, drafts: AheadDrafts) -> None:
        """Read the drafts of a step, before `observe`."""
        self.ahead.read(drafts)
        self.drafted |= drafts.drafted

    def _forest(self, proposed: Sequence[Proposed]) -> Forest:
        """The proposals' trees, calibrated if the policy wants that."""
        forest = Forest([p.candidates for p in proposed])
        if not self.policy.calibrated:
            return forest
        records = [self._record(p.scheduled.request, p.drafter) for p in proposed]
        calibrations = [self.controllers[p.drafter].calibration for p in proposed]
        return forest.calibrated(chances(forest, calibrations, records))

    def _round_seconds(self, proposed: Sequence[Proposed]) -> dict[int, float]:
        """Seconds of the rounds that proposed these, by drafter."""
        return {i: self.controllers[i].usual_round(n) for i, n in Counter(p.drafter for p in proposed).items()}

    def _select(
        self, scheduled: Sequence[ScheduledRequest], trees: Sequence[RequestTree], forest: Forest,
        rounds: Mapping[int, float], room: DraftRoom, nodes: int, budget: int, now: float,
    ) -> list[npt.NDArray[np.bool_]]:  # fmt: skip
        """The nodes to verify in a micro-batch, one mask per tree.

        `rounds`: seconds by drafter; `nodes`, `budget`: the micro-batch's share of the room and of the verify budget.
        """
        limits = [min(t.scheduled.drafts, len(c)) for t, c in zip(trees, forest, strict=True)]
        tokens, read = sum(s.count for s in scheduled), committed_positions(scheduled)
        step = StepCandidates(
            forest, limits, nodes, budget, [-inf] * len(trees), tokens, read, self.host.overhead(UNUSED)
        )
        probing = [i for i, tree in enumerate(trees) if any(self.controllers[p.drafter].probing for p in tree.parts)]
        if Need.SLOS not in self.policy.needs:
            return select_nodes(self.policy, step, probing)
        own_device = [seconds for i, seconds in rounds.items() if self.drafters[i].own_device]
        drafting = sum(rounds.values()) - sum(own_device) + max(own_device, default=0.0)
        others = room.known_tokens + room.drafted  # of the whole step; later micro-batches' drafts are not known
        return select_for_slos(
            self.policy, step, probing, lambda nodes: drafting + self.step_times.of(others + nodes, room.context),
            partial(_needs, [t.scheduled.request for t in trees], now),
        )  # fmt: skip

    @property
    def terms(self) -> StepTerms:
        """What `step_took` needs to know of the step that has just been launched."""
        return StepTerms(self._payoff, self._rounds)

    def step_took(self, plan: Plan, terms: StepTerms, tokens: int, took: StepTook) -> None:
        """Learn what drafts cost and save, from a step that gave `tokens` new tokens."""
        kind = DRAFTED if took.drafted else UNUSED if any(s.levels for s in plan.scheduled) else PLAIN
        self.host.observe(kind, took, terms.rounds)
        requests = len(plan.scheduled)
        if terms.payoff is not None and all(s.decodes for s in plan.scheduled):
            plain = self.step_times.of(requests, committed_positions(plan.scheduled)) + self.host.without_drafts
            terms.payoff.observe(tokens, requests, took.seconds, plain)

    def observe(self, request: Request, nodes: Sequence[int]) -> None:
        """Learn from the step's result for one scheduled request.

        `nodes` are the accepted nodes of its draft tree (indices in preorder, along the accepted path); empty if it had
        no tree.
        """
        for drafter in self.drafters:
            drafter.got_tokens(request, 1 + len(nodes))
        if self.assignment:
            self.assignment.observe(request, 1 + len(nodes))
        if drafted := self.drafted.pop(request.id, None):
            accepted = [int(drafted.draft.source[n]) for n in nodes]
            for part in drafted.parts:
                record = self._record(request, part.drafter)
                chosen, path = part.of_merged(drafted.chosen, accepted)
                self.controllers[part.drafter].observe(part.candidates, chosen, path, record, part.width)

    def drafter_failed(self, error: DrafterFailed) -> bool:
        """A drafter has failed. -> whether it drafts no more, because the same work failed several times in a row."""
        if self._failures[drafter := error.drafter, error.work] < MOST_FAILURES:
            return False
        self.drafters[drafter] = FailedDrafter(self.drafters[drafter].name, self.drafters[drafter].widths)
        return True

    def ended(self, request: Request) -> None:
        """The request has finished or was cancelled."""
        self.drafted.pop(request.id, None)
        for drafter in self.drafters:
            drafter.ended(request)
        if self.assignment:
            self.assignment.choice.ended(request)


def _needs(requests: Sequence[Request], now: float, seconds: float) -> list[float]:
    """Tokens that each request needs from a step of this length."""
    return [need(r, now, seconds) for r in requests]
