"""Nobody is let in who might need another's pages: ALISE's baseline (§3.2)."""

from __future__ import annotations

from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.kv.recompute import KVCacheManager
from jaxspec.sched.request import Request


class Defer(KVCacheManager):
    """A request is promised pages for all that it may write when it is let in, and keeps them to its end.

    So nobody ever loses pages. Seats still change hands, among those that have been let in.
    """

    can_preempt = False

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._promised: dict[str, int] = {}
        self._total = self._held = 0  # pages promised, and those of them that have been given out

    def fits(self, request: Request) -> bool:
        """Shared prefixes are not reckoned with: that errs on the safe side, and alone everybody fits."""
        return self._total - self._held + self._most(request) <= self.pool.num_free

    def allocate(self, request: Request) -> bool:
        if not (self.fits(request) and super().allocate(request)):
            return False
        self._promised[request.id] = most = self._most(request)
        self._total += most
        self._held += len(request.pages)
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        before = len(request.pages)
        grown = super().grow(request, ahead)
        self._held += len(request.pages) - before
        return grown

    def free(self, request: Request) -> None:
        self._total -= self._promised.pop(request.id, 0)
        self._held -= len(request.pages)
        super().free(request)

    def _most(self, request: Request) -> int:
        return self.pool.pages_for(request.prompt_len + request.max_tokens)
