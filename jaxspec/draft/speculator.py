"""Speculation in the engine: what to draft for each request of a step, and what is learned from what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Protocol

import numpy as np

from jaxspec.draft.ngram import NGramIndex
from jaxspec.draft.runner import DEPTH, DraftRunner
from jaxspec.sched.plan import Lookahead, Work
from jaxspec.sched.request import Request
from jaxspec.sched.speculation import Record, Speculation, Times
from jaxspec.sched.trees.candidates import Candidates, Draft, preorder
from jaxspec.sched.trees.policy import TreePolicy
from jaxspec.step.packing import Choosing, Tree

#: Most draft nodes of one request in a step.
MOST_NODES = 32


#: How a request's tokens are chosen.
ChoosingOf = Callable[[Request], Choosing]


class Drafter(Protocol):
    """Proposes candidates; is told nothing, because a request's tokens say what was accepted."""

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> Sequence[int]:
        """Beams it can grow, ascending."""
        ...

    def behind(self, request: Request) -> int:
        """Tokens of the request that the drafter has not seen."""
        ...

    def propose(self, works: Sequence[Work], choosing: ChoosingOf, levels: int, width: int) -> list[Candidates | None]:
        """Candidates for each request, None for those that it does not get to in this round."""
        ...

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        """What a round takes."""
        ...

    def forget(self, request: Request) -> None: ...


class NgramDrafter:
    """Looks the end of a request's text up in the text itself (`jaxspec.draft.ngram`)."""

    name, widths = "ngram", (1,)

    def __init__(self) -> None:
        self._indexes: dict[str, NGramIndex] = {}

    def behind(self, request: Request) -> int:
        return 0

    def propose(self, works: Sequence[Work], choosing: ChoosingOf, levels: int, width: int) -> list[Candidates | None]:
        return [self._candidates(w.request, levels) for w in works]

    def _candidates(self, request: Request, levels: int) -> Candidates:
        index = self._indexes.setdefault(request.id, NGramIndex())
        index.extend(request.tokens[len(index) :])
        token = np.asarray(index.propose(levels), np.int32)
        ahead = np.arange(len(token), dtype=np.int32)
        # It knows no probabilities: one a node, which calibration turns into what such matches are worth.
        return Candidates(token, ahead - 1, ((ahead + 1) * log(0.5)).astype(np.float32))

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        return 5e-6 * requests

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)


class ModelDrafter:
    """A draft model on the device. Keeps each request's watermark: how many of its tokens the model has seen."""

    def __init__(self, runner: DraftRunner, clock: Callable[[], float]):
        self.name, self.widths, self.runner, self._clock = runner.name, runner.widths, runner, clock
        self._seen: dict[str, tuple[int, int]] = {}  # id -> (preemptions at that time, tokens)
        self._profile = runner.profile()
        self._scale = 1.0  # how much longer a round takes than its profile says: attention, the host's part

    def _watermark(self, request: Request) -> int:
        preemptions, seen = self._seen.get(request.id, (0, 0))
        return seen if preemptions == request.preemptions else 0  # its pages are others' now

    def behind(self, request: Request) -> int:
        return len(request.tokens) - self._watermark(request)

    def propose(self, works: Sequence[Work], choosing: ChoosingOf, levels: int, width: int) -> list[Candidates | None]:
        begun = self._clock()
        most_tokens, most_requests = self.runner.shapes[-1].tokens, self.runner.shapes[-1].trees
        chains: list[Tree] = []
        whose: list[tuple[int, bool]] = []  # index of the work, and whether it has caught up
        room = most_tokens
        for i in sorted(range(len(works)), key=lambda i: self.behind(works[i].request)):
            request, seen = works[i].request, self._watermark(works[i].request)
            end = min(len(request.tokens), seen + room)
            if end <= seen or len(chains) == most_requests:
                break
            pages = np.asarray(request.pages, np.int32)
            chains.append(Tree.chain(request.tokens[seen:end], seen, pages, choosing(request)))
            whose.append((i, end == len(request.tokens)))
            self._seen[request.id] = (request.preemptions, end)
            room -= end - seen
        out: list[Candidates | None] = [None] * len(works)
        for (i, ready), candidates in zip(whose, self.runner.propose(chains, levels, width), strict=True):
            out[i] = candidates if ready else None
        tokens = sum(len(c.token) for c in chains)
        expected = self._profile(len(chains), tokens, levels, width)
        took = (self._clock() - begun) / expected if expected else 1.0
        self._scale += 0.05 * (min(took, 2 * self._scale) - self._scale)
        return out

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        return self._scale * self._profile(requests, min(catch_up, self.runner.shapes[-1].tokens), levels, width)

    def forget(self, request: Request) -> None:
        self._seen.pop(request.id, None)


@dataclass(slots=True)
class _Asked:
    """One request's candidates in the step under way and which of them are verified."""

    candidates: Candidates
    chosen: np.ndarray
    draft: Draft


class Speculator:
    """One drafter at work.

    A `policy` replaces the choice of nodes by expected speed, and unless it is `adaptive`, that of `levels` and `width`
    too.
    """

    def __init__(
        self, drafter: Drafter, step_seconds: dict[int, float], policy: TreePolicy | None = None,
        levels: int | None = None, width: int | None = None, adaptive: bool = False,
    ):  # fmt: skip
        self.drafter, self.policy, self.adaptive = drafter, policy, adaptive or policy is None
        self.times = Times(step_seconds, drafter.seconds)
        widths = [w for w in drafter.widths if width is None or w <= width]
        self.speculation = Speculation(self.times, Lookahead(MOST_NODES, min(levels or DEPTH, DEPTH)), widths)
        self._records: dict[str, Record] = {}
        self._asked: dict[str, _Asked] = {}

    def lookahead(self, running: Sequence[Request]) -> Lookahead:
        """How far the next step may draft for the requests that decode."""
        decoding = [r for r in running if r.decoding]
        if not decoding:
            return Lookahead()
        spec = self.speculation
        if not self.adaptive:
            spec.levels, spec.width = spec.most.levels, spec.widths[-1]
            return spec.most
        catch_up = sum(self.drafter.behind(r) for r in decoding)
        return spec.decide(len(decoding), catch_up, [self._record(r) for r in decoding])

    def _record(self, request: Request) -> Record:
        return self._records.setdefault(request.id, Record())

    def draft(self, work: Sequence[Work], choosing: ChoosingOf, tokens: int) -> dict[str, Draft]:
        """Draft trees by request id, for work that may have one; `tokens` known ones are in the step."""
        self._asked.clear()
        able = [w for w in work if w.levels]
        spec = self.speculation
        if not able or not spec.levels:
            return {}
        levels = min(spec.levels, max(w.levels for w in able))
        proposed = self.drafter.propose(able, choosing, levels, spec.width)
        pairs = [(w, _cut(c, w.levels)) for w, c in zip(able, proposed, strict=True) if c is not None and len(c)]
        if not pairs:
            return {}
        limits, candidates = [w.drafts for w, _ in pairs], [c for _, c in pairs]
        if self.policy is not None:
            masks = self.policy.select(candidates, limits)
        else:
            masks = spec.select(candidates, [self._record(w.request) for w, _ in pairs], limits, tokens)
        for (w, c), mask in zip(pairs, masks, strict=True):
            if mask.any():
                self._asked[w.request.id] = _Asked(c, mask, preorder(c, mask))
        return {key: asked.draft for key, asked in self._asked.items()}

    def observe(self, request: Request, nodes: Sequence[int]) -> None:
        """Of the request's draft tree the nodes `nodes` (in preorder, along the accepted path) were accepted."""
        if asked := self._asked.get(request.id):
            accepted = [int(asked.draft.source[n]) for n in nodes]
            self.speculation.observe(asked.candidates, asked.chosen, accepted, self._record(request))

    def observe_step(self, bucket: int, seconds: float) -> None:
        self.times.observe_step(bucket, seconds)

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        self.drafter.forget(request)


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
