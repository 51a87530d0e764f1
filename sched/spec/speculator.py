"""Speculation: what to draft for each request of a step, and what is learned from what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.sched.plan import Lookahead, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slo import need
from jaxspec.sched.spec.depth import (
    USUAL_CATCH_UP,
    AcceptanceRecord,
    DepthController,
    DraftTimes,
    chances,
    choose_nodes,
)
from jaxspec.sched.spec.drafter import Drafter, Proposal, SamplingOf
from jaxspec.sched.spec.trees.adaserve import AdaServe
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import TreePolicy
from jaxspec.sched.spec.trees.preorder import preorders
from jaxspec.sched.timing import StepTimes

if TYPE_CHECKING:
    from jaxspec.sched.spec.draft_choice import DraftChoice

#: Most levels of a draft tree, and most nodes of one request in a step.
DEPTH, MOST_NODES = 8, 32
#: A request that needs more tokens than this from a step is drafted for, also where that costs others.
_NEEDY = 1.0


@dataclass(slots=True)
class _Asked:
    """One request's candidates in the step under way, by which drafter, and which of them are verified."""

    drafter: int
    candidates: Candidates
    chosen: np.ndarray
    draft: Draft


class Speculator:
    """Drafters at work, side by side: each step, a request is drafted for by the one it should be fastest with.

    What is expected of each is learned by itself. A drafter that has nothing to propose leaves the request to the next
    best. With a `choice` that is not so: it says who drafts for whom, and hears what became of it.

    A `policy` replaces the choice of nodes by expected speed, and unless it is `adaptive`, that of `levels` and width
    (up to `width`) too: with `size_by_budget`, as deep and wide as AdaServe's Eq. 8 and 9 allow for a step of
    `verify_budget` tokens (None: as many as `step` says).
    An adaptive `AdaServe` drafts for those who are behind their targets even where that is slower for the others.

    With `calibrate`, policies see the chance that a node is accepted, as learned for each drafter (by what it said and
    the request's factor so far), instead of what the drafter says.
    """

    def __init__(
        self, drafters: Sequence[Drafter], step: StepTimes, policy: TreePolicy | None = None, levels: int | None = None,
        width: int | None = None, adaptive: bool = False, verify_budget: int | None = None,
        size_by_budget: bool = False, calibrate: bool = False, choice: DraftChoice | None = None,
    ):  # fmt: skip
        self.drafters, self.policy, self.adaptive = list(drafters), policy, adaptive or policy is None
        self.step, self.calibrate, self.choice = step, calibrate, choice
        self._verify_budget, self._budgeted = verify_budget, size_by_budget or verify_budget is not None
        most = Lookahead(MOST_NODES, min(levels or DEPTH, DEPTH))
        self.controllers = [
            DepthController(DraftTimes(step, d.seconds), most, [w for w in d.widths if width is None or w <= width])
            for d in drafters
        ]
        self._records: dict[str, list[AcceptanceRecord]] = {}
        self._asked: dict[str, _Asked] = {}
        self._only: set[str] | None = None  # who is drafted for in the step under way; None: all
        #: By request id, with a choice: whose turn it is to draft, who drafted last, and seconds of the slot under way.
        self._assigned: dict[str, int | None] = {}
        self._last: dict[str, int] = {}
        self._slots: dict[str, float] = {}
        self._verifying = step.of(1)  # seconds of the last step
        #: Changes of a request's drafter so far, and the seconds of computing its KV anew.
        self.switches, self.switch_seconds = 0, 0.0

    @property
    def verify_budget(self) -> int:
        """Tokens that a step holds before it becomes slow, AdaServe's B."""
        return self._verify_budget or self.step.verify_budget

    def lookahead(self, running: Sequence[Request], now: float) -> Lookahead:
        """How far the next step, which begins now, may draft for the requests that decode."""
        decoding = [r for r in running if r.decoding]
        self._only = None
        self._asked.clear()
        self._slots.clear()
        if self.choice:
            if not any(drafter.own_device for drafter in self.drafters):
                self.choice.share(self._verifying, [spec.last_round for spec in self.controllers])
            drafters = self.choice.assign(decoding, self._switch_cost)
            self._assigned = {r.id: i for r, i in zip(decoding, drafters, strict=True)}
        if not decoding:
            return Lookahead()
        if not self.adaptive:
            return _furthest(
                [
                    self._shape(spec, len(decoding)) if self._own(i, decoding) else spec.off()
                    for i, spec in enumerate(self.controllers)
                ]
            )
        ahead = _furthest([self._decide(i, decoding) for i in range(len(self.drafters))])
        if not ahead.levels and isinstance(self.policy, AdaServe):
            return self._draft_for_late(decoding, now)
        return ahead

    def _own(self, drafter: int, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of the requests that it may draft for."""
        if not self.drafters[drafter].ready:
            return []
        return [r for r in requests if self._assigned.get(r.id) == drafter] if self.choice else requests

    def _switch_cost(self, request: Request, drafter: int) -> float:
        """Seconds in which it computes the KV that it lacks of the request."""
        d = self.drafters[drafter]
        return max(
            0.0, d.seconds(1, d.uncached_tokens(request), 1, d.widths[0]) - d.seconds(1, USUAL_CATCH_UP, 1, d.widths[0])
        )

    def _decide(self, drafter: int, decoding: Sequence[Request]) -> Lookahead:
        spec, own = self.controllers[drafter], self._own(drafter, decoding)
        if not own:
            return spec.off()
        return spec.decide(len(own), *self._known(drafter, own), len(decoding) - len(own))

    def _known(self, drafter: int, requests: Sequence[Request]) -> tuple[int, list[AcceptanceRecord]]:
        """Tokens that a drafter has to catch up with for these requests, and what is known of its drafts for them."""
        uncached = self.drafters[drafter].uncached_tokens
        return sum(uncached(r) for r in requests), [self._record(r, drafter) for r in requests]

    def _shape(self, spec: DepthController, requests: int) -> Lookahead:
        """As far as the configuration says, or as far as is left of the budget for each (AdaServe's Eq. 8 and 9)."""
        spec.levels, spec.width, spec.probing = spec.most.levels, spec.widths[-1], False
        if not self._budgeted:
            return spec.most
        if self.verify_budget <= requests:
            spec.levels = 0
            return Lookahead()
        spec.levels = max(1, min(spec.most.levels, ceil(self.verify_budget / requests)))
        wide = max(1, self.verify_budget // requests)
        spec.width = max((w for w in spec.widths if w <= wide), default=spec.widths[0])
        return Lookahead(spec.most.drafts, spec.levels)

    def _draft_for_late(self, decoding: Sequence[Request], now: float) -> Lookahead:
        """Draft for those alone who are behind their targets, as far as that helps them."""
        room, seconds = max(0, self.verify_budget - len(decoding)), self.step.of(len(decoding))
        needs = {r.id: need(r, now, seconds) for r in decoding}
        late = [r for r in decoding if needs[r.id] > _NEEDY]
        needy = sorted(late, key=lambda r: -needs[r.id])[:room]
        if not needy:
            return Lookahead()
        self._only = {r.id for r in needy}
        shares = [self._own(i, needy) for i in range(len(self.drafters))]
        return _furthest(
            [
                spec.decide_for_late(len(own), len(decoding), *self._known(i, own), room) if own else spec.off()
                for i, (spec, own) in enumerate(zip(self.controllers, shares, strict=True))
            ]
        )

    def _record(self, request: Request, drafter: int) -> AcceptanceRecord:
        own = self._records.setdefault(request.id, [])
        if not own:
            own += [AcceptanceRecord() for _ in self.drafters]
        return own[drafter]

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before any of a step's work is launched: see that drafters elsewhere have what they need of the target's."""
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device and (mine := [w for w in scheduled if w.levels and i in self._about(w.request)]):
                drafter.prefetch_features(mine)

    def _about(self, request: Request) -> tuple[int | None, ...]:
        """The drafters that may have to know the request in this step."""
        if not self.choice:
            return tuple(range(len(self.drafters)))
        return self._assigned.get(request.id), self.choice.ahead(request)

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """While the target verifies: those drafters that idle meanwhile catch up with requests that are likely to
        change to them (SPIN §IV-C)."""
        if not self.choice:
            return
        for i, drafter in enumerate(self.drafters):
            if drafter.own_device:
                coming = [
                    w
                    for w in scheduled
                    if w.levels and self._assigned.get(w.request.id) != i == self.choice.ahead(w.request)
                ]
                if coming:
                    drafter.precompute_kv(coming, sampling)

    def draft(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, tokens: int, now: float
    ) -> dict[str, Draft]:
        """Draft trees by request id, for work that may have one; `tokens` known ones are in the step that began now."""
        able = [w for w in scheduled if w.levels and (self._only is None or w.request.id in self._only)]
        if self._budgeted and tokens >= self.verify_budget:
            able = []  # nothing of what the drafters propose would be taken
        proposed = self._propose(able, sampling) if able else []
        drafts: dict[str, Draft] = {}
        if proposed:
            forest = Forest([c for _, _, c in proposed])
            masks = self._select(proposed, forest, tokens, now)
            for (w, i, c), mask, draft in zip(proposed, masks, preorders(forest, masks), strict=True):
                if len(draft):
                    self._asked[w.request.id] = _Asked(i, c, mask, draft)
                    drafts[w.request.id] = draft
        if self.choice:
            self._open_slots(scheduled, proposed, tokens + sum(map(len, drafts.values())))
        return drafts

    def _open_slots(
        self,
        scheduled: Sequence[ScheduledRequest],
        proposed: Sequence[tuple[ScheduledRequest, int, Candidates]],
        tokens: int,
    ) -> None:
        """What the step takes each request: as profiled and kept up to date, so that a pause of the machine is nobody's
        fault, and without computing KV that a change of drafter made necessary, which is the change's.

        Rounds beside the target take time from all, those of a drafter apart from the requests that it drafts for.
        """
        drafted = {w.request.id: i for w, i, _ in proposed}
        rounds = {i: self.controllers[i].usual_round(n) for i, n in Counter(drafted.values()).items()}
        self._verifying = self.step.of(tokens)
        common = self._verifying + sum(s for i, s in rounds.items() if not self.drafters[i].own_device)
        for w in scheduled:
            if (name := w.request.id) in self._assigned:
                own_device = name in drafted and self.drafters[drafted[name]].own_device
                self._slots[name] = common + (rounds[drafted[name]] if own_device else 0.0)

    def _select(
        self, proposed: Sequence[tuple[ScheduledRequest, int, Candidates]], forest: Forest, tokens: int, now: float
    ) -> list[np.ndarray]:
        limits = [w.drafts for w, _, _ in proposed]
        if self.policy is None or self.calibrate:
            records = [self._record(w.request, i) for w, i, _ in proposed]
            learned = chances(forest, [self.controllers[i] for _, i, _ in proposed], records)
            if self.policy is None:
                probing = [self.controllers[i].probing for _, i, _ in proposed]
                return choose_nodes(self.step, forest, learned, limits, tokens, probing)
            with np.errstate(divide="ignore"):  # empty places have no chance
                forest = forest.likely(np.log(learned))
        room = self.verify_budget - tokens
        seconds = self.step.of(tokens + max(0, room)) + sum(
            s.times.round(len(proposed), len(proposed), s.levels, s.width) for s in self.controllers if s.levels
        )
        needs = [need(w.request, now, seconds) for w, _, _ in proposed]
        masks = self.policy.select(forest, limits, room, needs, tokens)
        for (w, i, _), c, mask in zip(proposed, forest, masks, strict=True):
            if self.controllers[i].probing and not mask.any() and w.drafts:
                mask[c.best(1)[0]] = True  # to learn something is worth a step
        return masks

    def _propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf
    ) -> list[tuple[ScheduledRequest, int, Candidates]]:
        """(work, drafter, candidates), at least one of each; the drafters that cost least are asked first."""
        wanted = {w.request.id: self._preferences(w.request, len(scheduled)) for w in scheduled}
        found: list[tuple[ScheduledRequest, int, Candidates]] = []

        def take(i: int, mine: Sequence[ScheduledRequest], levels: int, proposal: Proposal) -> None:
            for w, c in zip(mine, proposal(), strict=True):
                if c is None or not len(c):
                    wanted[w.request.id].remove(i)
                    continue
                found.append((w, i, _cut(c, w.levels) if w.levels < levels else c))
                wanted[w.request.id].clear()

        order = sorted(
            (i for i, drafter in enumerate(self.drafters) if drafter.ready),
            key=lambda i: self.drafters[i].seconds(1, 0, 1, self.drafters[i].widths[0]),
        )
        asked: dict[int, tuple[Sequence[ScheduledRequest], int, Proposal]] = {}
        for i in (*order, *order):  # once more, for those whom a dearer one had nothing for
            spec = self.controllers[i]
            mine = [w for w in scheduled if wanted[w.request.id][:1] == [i]]
            if not mine or i in asked:  # one round a step
                continue
            levels = min(spec.levels, max(w.levels for w in mine))
            if self.choice:
                self._count_switches(i, mine)
            asked[i] = mine, levels, self.drafters[i].propose(mine, sampling, levels, spec.width)
            if not self._at_once(i):
                take(i, *asked[i])
        for i, proposal in asked.items():
            if self._at_once(i):
                take(i, *proposal)
        return found

    def _at_once(self, drafter: int) -> bool:
        """Whether others draft meanwhile: they have their own devices, and nobody waits for what it leaves over."""
        return self.choice is not None and self.drafters[drafter].own_device

    def drafter_of(self, request: Request, requests: int) -> int | None:
        """The drafter that is to draft for it in this step, one of so many requests; None: none."""
        return next(iter(self._preferences(request, requests)), None)

    def drafted_by(self, request: Request) -> int | None:
        """The drafter of the tree that is verified for it in this step."""
        asked = self._asked.get(request.id)
        return None if asked is None else asked.drafter

    def _count_switches(self, drafter: int, scheduled: Sequence[ScheduledRequest]) -> None:
        for w in scheduled:
            if self._last.setdefault(w.request.id, drafter) != drafter:
                self.switches += 1
                self.switch_seconds += self._switch_cost(w.request, drafter)
            self._last[w.request.id] = drafter

    def _preferences(self, request: Request, requests: int) -> list[int]:
        """The drafters that draft at all in this step: those to be looked at again, then the fastest for this request
        first, equals in the order given; or the one that was chosen."""
        active = [i for i, s in enumerate(self.controllers) if s.levels]
        if self.choice:
            return [i for i in active if i == self._assigned.get(request.id)]
        if len(active) < 2:
            return active
        speed = {i: self.controllers[i].speed(requests, self._record(request, i)) for i in active}
        return sorted(active, key=lambda i: (not self.controllers[i].probing, -speed[i]))

    def observe(self, request: Request, nodes: Sequence[int]) -> None:
        """The request took part in the step; of its draft tree, if it had one, the nodes `nodes` (in preorder, along
        the accepted path) were accepted."""
        seconds = self._slots.pop(request.id, None)
        if self.choice and seconds is not None:
            self.choice.observe(request, self._assigned[request.id], 1 + len(nodes), seconds)
        if asked := self._asked.get(request.id):
            accepted = [int(asked.draft.source[n]) for n in nodes]
            record = self._record(request, asked.drafter)
            self.controllers[asked.drafter].observe(asked.candidates, asked.chosen, accepted, record)

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        self._last.pop(request.id, None)
        if self.choice:
            self.choice.forget(request)
        for drafter in self.drafters:
            drafter.forget(request)


def _furthest(ahead: Sequence[Lookahead]) -> Lookahead:
    """As far as any of them goes."""
    return Lookahead(max((a.drafts for a in ahead), default=0), max((a.levels for a in ahead), default=0))


def _cut(candidates: Candidates, levels: int) -> Candidates:
    """Candidates down to `levels` levels: a request may not be able to take more tokens."""
    keep = np.asarray(candidates.depths()) <= levels
    if keep.all():
        return candidates
    logprob = np.where(keep, candidates.logprob, -np.inf).astype(np.float32)
    return replace(candidates, logprob=logprob)
