"""`memory: defer`: admit only requests whose expected output fits (ALISE's baseline, §3.2 and §4.3)."""

from __future__ import annotations

from math import ceil

from pydantic import Field

from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.request import Request
from jaxspec.sched.slots import MEMORIES, Need, Section, SlotContext


class DeferSettings(Section):
    """`memory: defer`: admit only requests whose expected output fits."""

    #: Reserve the output tokens that are not exceeded with this probability, by the lengths of ended requests relative
    #: to their predictions. None: the prediction itself.
    quantile: float | None = Field(default=None, gt=0, lt=1)


@MEMORIES.register("defer", DeferSettings)
class Defer(KVCacheManager):
    """Defers requests for which the pool has no room, prompt and output together; reserves the room of those admitted.

    The output counts as predicted, or as the `quantile` that the prediction has, or as max_tokens without one.
    Admitted requests may be paused: they lose their slot, not their pages. An output longer than predicted takes more
    pages than were reserved, and its reservation grows with its prediction. If none is free then, the last request is
    preempted and recomputed, as with `recompute`; so with exact predictions or none, no request loses pages.
    """

    needs = frozenset({Need.LENGTHS})

    def __init__(
        self, pool: PagePool, lengths: LengthDistribution | None = None, quantile: float | None = None
    ) -> None:
        super().__init__(pool)
        self._lengths, self._quantile = lengths, quantile
        self._reserved: dict[str, int] = {}
        self._total = self._held = 0  # pages reserved, and those of them allocated

    @classmethod
    def build(cls, settings: DeferSettings, context: SlotContext) -> Defer:
        assert context.pool is not None
        return cls(context.pool, context.lengths, settings.quantile)

    def fits(self, request: Request) -> bool:
        """Ignores prefix sharing (conservative); a lone request always fits."""
        return self._expected(request) <= self._unreserved

    def allocate(self, request: Request) -> bool:
        if not (self.fits(request) and super().allocate(request)):
            return False
        self._held += len(request.pages)
        self._reserve(request)
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Drafts never take pages reserved for other requests."""
        self._reserve(request)
        beyond = self.pool.pages_for(request.most_known + ahead) - self._reserved[request.id]
        if ahead and beyond > max(0, self._unreserved):
            return False
        before = len(request.pages)
        grown = super().grow(request, ahead)
        self._held += len(request.pages) - before
        self._reserve(request)
        return grown

    def free(self, request: Request) -> None:
        self._total -= self._reserved.pop(request.id, 0)
        self._held -= len(request.pages)
        super().free(request)

    @property
    def _unreserved(self) -> int:
        """Free pages that no admitted request has reserved; negative if outputs have outgrown their predictions."""
        return self.pool.num_free - (self._total - self._held)

    def _reserve(self, request: Request) -> None:
        """Adapt the reservation of an admitted request to its prediction and to the pages it has."""
        pages = max(self._expected(request), len(request.pages))
        self._total += pages - self._reserved.get(request.id, 0)
        self._reserved[request.id] = pages

    def _expected(self, request: Request) -> int:
        expected = request.expected_len
        predicted = request.first_prediction is not None or request.repredicted
        if self._quantile is not None and self._lengths is not None and predicted:
            expected = self._lengths.quantile(request, self._quantile)
        output = max(ceil(expected), request.output_len + 1)
        return self.pool.pages_for(request.prompt_len + min(output, request.max_tokens))
