"""The drafter that runs a draft model on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxspec.draft.runner import DraftRunner
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import AheadProposal, Proposal, SamplingOf
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.sched.timing import DraftRoundTimes
from jaxspec.step.packing import SamplingInputs, Tree

#: A read shorter than this (seconds) did not wait: the round had ended earlier.
_NO_WAIT = 2e-4


class _Cached(NamedTuple):
    """A request's tokens in the draft model's KV cache.

    losses     `_losses` at that time
    tokens     their number
    following  whether the tokens of the step under way are there too: a round that follows it has been launched
    """

    losses: int = 0
    tokens: int = 0
    following: bool = False


class ModelDrafter:
    """A draft model. Keeps each request's watermark: the number of its tokens in the draft model's KV cache."""

    def __init__(self, runner: DraftRunner, clock: Callable[[], float]):
        self.name, self.widths, self.runner, self._clock = runner.name, runner.widths, runner, clock
        self._cached = PerRequest[_Cached](lambda _: _Cached())
        self._prefetched: dict[str, range] = {}  # id -> rows with the features before its next tokens
        self._times = DraftRoundTimes(
            lambda requests, uncached, *shape: runner.seconds(requests, min(uncached, runner.most_tokens), *shape)
        )

    @property
    def own_device(self) -> bool:
        return self.runner.own_device

    @property
    def reads_features(self) -> bool:
        return self.runner.conditioned

    @property
    def free(self) -> bool:
        return False

    @property
    def drafts_ahead(self) -> bool:
        return not self.own_device

    @property
    def ready(self) -> bool:
        return self.runner.usable

    def _watermark(self, request: Request) -> int:
        cached = self._cached.of(request)
        # After a loss the pages belong to other requests. Pages swapped out held the target's computed tokens at most.
        return min(cached.tokens, request.computed) if cached.losses == self._losses(request) else 0

    def _losses(self, request: Request) -> int:
        """How often a preemption has lost the request's draft KV. A swap keeps it if the drafter shares the target's
        device."""
        return request.preemptions - (0 if self.own_device else request.swaps)

    def ended(self, request: Request) -> None:
        pass

    def got_tokens(self, request: Request, count: int) -> None:
        if (cached := self._cached.of(request)).following:
            self._cached.set(request, _Cached(cached.losses, cached.tokens + count))

    def serves(self, request: Request) -> bool:
        return True

    def uncached_tokens(self, request: Request) -> int:
        return request.most_known - self._watermark(request)

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self._prefetched.clear()
        if not self.runner.conditioned:
            return
        page_size, left = self.runner.page_size, self.runner.most_tokens
        slots: list[np.ndarray] = []
        for request in sorted((s.request for s in scheduled), key=self.uncached_tokens):
            cached = self._watermark(request)
            position = np.arange(cached, min(len(request.tokens), cached + left)) - 1
            if not len(position):
                break
            pages = np.asarray(request.pages, np.int32)
            slots.append(np.where(position < 0, -1, pages[position // page_size] * page_size + position % page_size))
            first = self.runner.most_tokens - left
            self._prefetched[request.id] = range(first, first + len(position))
            left -= len(position)
        if slots:
            self.runner.prefetch_features(np.concatenate(slots))

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        started = self._clock()
        chains, sources, rows = self._chains(scheduled, sampling)
        read = self.runner.start(chains, levels, width, rows)
        size = len(chains), sum(len(c.token) for c in chains), levels, width

        def proposal() -> list[Candidates | None]:
            waiting = self._clock()
            out: list[Candidates | None] = [None] * len(scheduled)
            for (i, complete), candidates in zip(sources, read(), strict=True):
                out[i] = candidates if complete else None
            now = self._clock()
            self._times.observe(*size, now - started, at_most=now - waiting < _NO_WAIT)
            return out

        return proposal

    def propose_ahead(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, after: Mapping[str, int],
        before: Any,
    ) -> AheadProposal:  # fmt: skip
        chains, sources, _ = self._chains(scheduled, sampling, after)
        on_device, read = self.runner.start_ahead(chains, levels, before)
        rows = {i: row for row, (i, complete) in enumerate(sources) if complete}
        first = [rows[i] * DEPTH if i in rows else None for i in range(len(scheduled))]

        def proposal() -> list[Candidates | None]:
            found = read()
            return [found[rows[i]] if i in rows else None for i in range(len(scheduled))]

        seconds = self.seconds(len(chains), sum(len(c.token) for c in chains), levels, self.widths[0])
        return AheadProposal(on_device, first, proposal, seconds)

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        chains, _, rows = self._chains(scheduled, sampling)
        if chains:
            self.runner.start(chains, 0, self.widths[0], rows)

    def _chains(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, after: Mapping[str, int] | None = None
    ) -> tuple[list[Tree], list[tuple[int, bool]], list[range]]:
        """The uncached tokens as chains, as many as fit a round, requests with the fewest first; raises watermarks.

        `after`: see `propose_ahead`. Returns the chains; for each, its index in `scheduled` and whether it covers all
        uncached tokens; and the rows of its prefetched features (a conditioned drafter on its own device only).
        """
        chains: list[Tree] = []
        sources: list[tuple[int, bool]] = []
        rows: list[range] = []
        left, max_requests = self.runner.most_tokens, self.runner.shapes[-1].trees
        for i in sorted(range(len(scheduled)), key=lambda i: self.uncached_tokens(scheduled[i].request)):
            if len(chains) == max_requests:
                break
            request, prefetched = scheduled[i].request, range(left)
            if staged := self.own_device and self.runner.conditioned:
                prefetched = self._prefetched.get(request.id, range(0))
            tree = -1 if after is None else after.get(request.id, -1)
            chain, complete = self._chain(request, sampling(request), tree, min(left, len(prefetched)))
            if chain is None:
                break
            chains.append(chain)
            sources.append((i, complete))
            if staged:
                rows.append(prefetched[: len(chain.token)])
            left -= len(chain.token)
        return chains, sources, rows

    def _chain(self, request: Request, sampling: SamplingInputs, after: int, fits: int) -> tuple[Tree | None, bool]:
        """The request's uncached tokens as a chain of at most `fits`, and whether it has all of them; raises its
        watermark. None: none fit.

        `after`: its tree in the step under way; -1: none. The chain then ends with as many tokens as that step may
        give (`jaxspec.step.ahead`), or has none of them.
        """
        cached, pages = self._watermark(request), np.asarray(request.pages, np.int32)
        known = request.tokens[cached:] if after < 0 else request.tokens[cached:-1]
        coming = 0 if after < 0 else 1 + request.pending_drafts
        complete = len(known) + coming <= fits
        if not complete:
            known, coming, after = known[:fits], 0, -1
        if not known and not coming:
            return None, False
        self._cached.set(request, _Cached(self._losses(request), cached + len(known), coming > 0))
        chain = Tree.chain([*known, *range(-1, -1 - coming, -1)], cached, pages, sampling, after=after)
        return (replace(chain, rows=np.asarray([len(known)], np.int32)) if coming else chain), complete

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return self._times.of(requests, uncached, levels, width)
