"""What proposes drafts: a look-up in the text itself, or a model on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np

from jaxspec.draft.ngram import NGramIndex
from jaxspec.draft.runner import DraftRunner
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.step.packing import Tree

#: Seconds in which candidates are read that are there already.
_AT_ONCE = 2e-4


class NgramDrafter(SharedDevice):
    """Looks the end of a request's text up in the text itself (`jaxspec.draft.ngram`)."""

    name, widths = "ngram", (1,)

    def __init__(self) -> None:
        self._indexes: dict[str, NGramIndex] = {}

    def uncached_tokens(self, request: Request) -> int:
        return 0

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        found: list[Candidates | None] = [self._candidates(w.request, levels) for w in scheduled]
        return lambda: found

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
        self._seen: dict[str, tuple[int, int]] = {}  # id -> (losses of its KV at that time, tokens)
        self._staged: dict[str, range] = {}  # id -> where the features before its next tokens are
        self._scale = 1.0  # how much longer a round takes than its profile says: attention, the host's part

    @property
    def own_device(self) -> bool:
        return self.runner.own_device

    @property
    def ready(self) -> bool:
        return self.runner.usable

    def _watermark(self, request: Request) -> int:
        lost, seen = self._seen.get(request.id, (0, 0))
        # Pages lost for good are others' now. Those that went to the host held no more than the target's KV.
        return min(seen, request.computed) if lost == self._losses(request) else 0

    def _losses(self, request: Request) -> int:
        """Times that the drafter's KV of a request was lost: what goes to the host takes along the rows of those
        drafters that stand beside the target."""
        return request.preemptions - (0 if self.own_device else request.swaps)

    def uncached_tokens(self, request: Request) -> int:
        return len(request.tokens) - self._watermark(request)

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self._staged.clear()
        if not self.runner.conditioned:
            return
        page_size, room = self.runner.page_size, self.runner.most_tokens
        slots: list[np.ndarray] = []
        for one in sorted(scheduled, key=lambda w: self.uncached_tokens(w.request)):
            request, seen = one.request, self._watermark(one.request)
            position = np.arange(seen, min(len(request.tokens), seen + room)) - 1
            if not len(position):
                break
            pages = np.asarray(request.pages, np.int32)
            slots.append(np.where(position < 0, -1, pages[position // page_size] * page_size + position % page_size))
            first = self.runner.most_tokens - room
            self._staged[request.id] = range(first, first + len(position))
            room -= len(position)
        self.runner.prefetch_features(np.concatenate(slots))

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        begun = self._clock()
        chains, whose, staged = self._chains(scheduled, sampling)
        read = self.runner.start(chains, levels, width, staged)
        tokens = sum(len(c.token) for c in chains)
        expected = self.runner.seconds(len(chains), tokens, levels, width)

        def proposal() -> list[Candidates | None]:
            asked = self._clock()
            out: list[Candidates | None] = [None] * len(scheduled)
            for (i, complete), candidates in zip(whose, read(), strict=True):
                out[i] = candidates if complete else None
            now = self._clock()
            took = (now - begun) / expected if expected else 1.0
            if now - asked < _AT_ONCE:  # it was done before, nobody saw when
                took = min(took, self._scale)
            self._scale += 0.05 * (min(took, 2 * self._scale) - self._scale)
            return out

        return proposal

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        chains, _, staged = self._chains(scheduled, sampling)
        if chains:
            self.runner.start(chains, 0, self.widths[0], staged)

    def _chains(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf
    ) -> tuple[list[Tree], list[tuple[int, bool]], list[range]]:
        """What to catch up with, those with the least first: the chains, whose each is (index of the work, and whether
        that is all of it), and where the features for them were staged."""
        chains: list[Tree] = []
        whose: list[tuple[int, bool]] = []
        staged: list[range] = []
        room, most_requests = self.runner.most_tokens, self.runner.shapes[-1].trees
        for i in sorted(range(len(scheduled)), key=lambda i: self.uncached_tokens(scheduled[i].request)):
            request, seen = scheduled[i].request, self._watermark(scheduled[i].request)
            end = min(len(request.tokens), seen + room)
            if self.own_device and self.runner.conditioned:
                there = self._staged.get(request.id, range(0))
                end = min(end, seen + len(there))
                staged.append(there[: end - seen])
            if end <= seen or len(chains) == most_requests:
                break
            pages = np.asarray(request.pages, np.int32)
            chains.append(Tree.chain(request.tokens[seen:end], seen, pages, sampling(request)))
            whose.append((i, end == len(request.tokens)))
            self._seen[request.id] = (self._losses(request), end)
            room -= end - seen
        return chains, whose, staged[: len(chains)]

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        return self._scale * self.runner.seconds(requests, min(catch_up, self.runner.most_tokens), levels, width)

    def forget(self, request: Request) -> None:
        self._seen.pop(request.id, None)
