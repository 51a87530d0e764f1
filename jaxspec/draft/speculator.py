"""Speculation in the engine: what to draft for each request of a step, and what is learned from what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.draft.drafter import ChoosingOf, Drafter, ModelDrafter
from jaxspec.draft.runner import DEPTH, DraftRunner
from jaxspec.sched.plan import Lookahead, Work
from jaxspec.sched.request import Request
from jaxspec.sched.speculation import Record, Speculation, Times, choose_nodes
from jaxspec.sched.trees.candidates import Candidates, Draft, preorder
from jaxspec.sched.trees.policy import TreePolicy

#: Most draft nodes of one request in a step.
MOST_NODES = 32


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
    best. A `policy` replaces the choice of nodes by expected speed, and unless it is `adaptive`, that of `levels` and
    width (up to `width`) too.
    """

    def __init__(
        self, drafters: Sequence[Drafter], step_seconds: dict[int, float], policy: TreePolicy | None = None,
        levels: int | None = None, width: int | None = None, adaptive: bool = False,
    ):  # fmt: skip
        self.drafters, self.policy, self.adaptive = list(drafters), policy, adaptive or policy is None
        most = Lookahead(MOST_NODES, min(levels or DEPTH, DEPTH))
        self.speculations = [
            Speculation(Times(step_seconds, d.seconds), most, [w for w in d.widths if width is None or w <= width])
            for d in drafters
        ]
        self._records: dict[str, list[Record]] = {}
        self._asked: dict[str, _Asked] = {}

    @property
    def runners(self) -> list[DraftRunner]:
        """Those of the drafters that are models: they have pools of their own."""
        return [d.runner for d in self.drafters if isinstance(d, ModelDrafter)]

    def lookahead(self, running: Sequence[Request]) -> Lookahead:
        """How far the next step may draft for the requests that decode."""
        decoding = [r for r in running if r.decoding]
        if not decoding:
            return Lookahead()
        drafts = levels = 0
        for i, (drafter, spec) in enumerate(zip(self.drafters, self.speculations, strict=True)):
            if self.adaptive:
                catch_up = sum(drafter.behind(r) for r in decoding)
                ahead = spec.decide(len(decoding), catch_up, [self._record(r, i) for r in decoding])
            else:
                spec.levels, spec.width = spec.most.levels, spec.widths[-1]
                ahead = spec.most
            drafts, levels = max(drafts, ahead.drafts), max(levels, ahead.levels)
        return Lookahead(drafts, levels)

    def _record(self, request: Request, drafter: int) -> Record:
        own = self._records.setdefault(request.id, [])
        if not own:
            own += [Record() for _ in self.drafters]
        return own[drafter]

    def draft(self, work: Sequence[Work], choosing: ChoosingOf, tokens: int) -> dict[str, Draft]:
        """Draft trees by request id, for work that may have one; `tokens` known ones are in the step."""
        self._asked.clear()
        able = [w for w in work if w.levels]
        proposed = self._propose(able, choosing) if able else []
        if not proposed:
            return {}
        limits, candidates = [w.drafts for w, _, _ in proposed], [c for _, _, c in proposed]
        if self.policy is not None:
            masks = self.policy.select(candidates, limits)
        else:
            chances = [self.speculations[i].chances(c, self._record(w.request, i)) for w, i, c in proposed]
            probing = [self.speculations[i].probing for _, i, _ in proposed]
            masks = choose_nodes(self.speculations[0].times, chances, limits, tokens, probing)
        for (w, i, c), mask in zip(proposed, masks, strict=True):
            if mask.any():
                self._asked[w.request.id] = _Asked(i, c, mask, preorder(c, mask))
        return {key: asked.draft for key, asked in self._asked.items()}

    def _propose(self, works: Sequence[Work], choosing: ChoosingOf) -> list[tuple[Work, int, Candidates]]:
        """(work, drafter, candidates), at least one of each; the drafters that cost least are asked first."""
        wanted = {w.request.id: self._preferences(w.request, len(works)) for w in works}
        found: list[tuple[Work, int, Candidates]] = []
        order = sorted(
            range(len(self.drafters)), key=lambda i: self.drafters[i].seconds(1, 0, 1, self.drafters[i].widths[0])
        )
        asked: set[int] = set()
        for i in (*order, *order):  # once more, for those whom a dearer one had nothing for
            spec = self.speculations[i]
            mine = [w for w in works if wanted[w.request.id][:1] == [i]]
            if not mine or i in asked:  # one round a step
                continue
            asked.add(i)
            levels = min(spec.levels, max(w.levels for w in mine))
            for w, c in zip(mine, self.drafters[i].propose(mine, choosing, levels, spec.width), strict=True):
                if c is None or not len(c):
                    wanted[w.request.id].remove(i)
                    continue
                found.append((w, i, _cut(c, w.levels)))
                wanted[w.request.id].clear()
        return found

    def _preferences(self, request: Request, requests: int) -> list[int]:
        """The drafters that draft at all in this step: those to be looked at again, then the fastest for this request
        first, equals in the order given."""
        active = [i for i, s in enumerate(self.speculations) if s.levels]
        if len(active) < 2:
            return active
        speed = {i: self.speculations[i].speed(requests, self._record(request, i)) for i in active}
        return sorted(active, key=lambda i: (not self.speculations[i].probing, -speed[i]))

    def observe(self, request: Request, nodes: Sequence[int]) -> None:
        """Of the request's draft tree the nodes `nodes` (in preorder, along the accepted path) were accepted."""
        if asked := self._asked.get(request.id):
            accepted = [int(asked.draft.source[n]) for n in nodes]
            record = self._record(request, asked.drafter)
            self.speculations[asked.drafter].observe(asked.candidates, asked.chosen, accepted, record)

    def observe_step(self, bucket: int, seconds: float) -> None:
        for spec in self.speculations:
            spec.times.observe_step(bucket, seconds)

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        for drafter in self.drafters:
            drafter.forget(request)


def _cut(candidates: Candidates, levels: int) -> Candidates:
    """Candidates down to `levels` levels: a request may not be able to take more tokens."""
    depth: list[int] = []
    for parent in candidates.parent.tolist():
        depth.append(1 if parent < 0 else depth[parent] + 1)
    keep = np.asarray(depth) <= levels
    if keep.all():
        return candidates
    logprob = np.where(keep, candidates.logprob, -np.inf).astype(np.float32)
    return replace(candidates, logprob=logprob)
