"""What proposes drafts: a look-up in the text itself, or a model on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np

from jaxspec.draft.ngram import NGramIndex
from jaxspec.draft.runner import DraftRunner
from jaxspec.sched.drafter import ChoosingOf
from jaxspec.sched.plan import Work
from jaxspec.sched.request import Request
from jaxspec.sched.trees.candidates import Candidates
from jaxspec.step.packing import Tree


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


def _losses(request: Request) -> int:
    """Times that a request lost its pages for good: what goes to the host takes the drafters' rows along."""
    return request.preemptions - request.swaps


class ModelDrafter:
    """A draft model on the device. Keeps each request's watermark: how many of its tokens the model has seen."""

    def __init__(self, runner: DraftRunner, clock: Callable[[], float], keep_profile: bool = True):
        self.name, self.widths, self.runner, self._clock = runner.name, runner.widths, runner, clock
        self._seen: dict[str, tuple[int, int]] = {}  # id -> (losses of its pages at that time, tokens)
        self._profile = runner.profile(keep_profile)
        self._scale = 1.0  # how much longer a round takes than its profile says: attention, the host's part

    def _watermark(self, request: Request) -> int:
        lost, seen = self._seen.get(request.id, (0, 0))
        # Pages lost for good are others' now. Those that went to the host held no more than the target's KV.
        return min(seen, request.computed) if lost == _losses(request) else 0

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
            self._seen[request.id] = (_losses(request), end)
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
