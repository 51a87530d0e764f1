"""`memory: defer`: admit only requests whose whole output fits (ALISE's baseline, §3.2)."""

from __future__ import annotations

from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.request import Request
from jaxspec.sched.slots import MEMORIES


@MEMORIES.register("defer")
class Defer(KVCacheManager):
    """Reserves pages for prompt and max_tokens at admission, so no request ever loses pages.

    Admitted requests may still be paused: they lose their slot, not their pages.
    """

    can_preempt = False

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._reserved: dict[str, int] = {}
        self._total = self._held = 0  # pages reserved, and those of them allocated

    def fits(self, request: Request) -> bool:
        """Ignores prefix sharing (conservative); a lone request always fits."""
        return self._total - self._held + self._most(request) <= self.pool.num_free

    def allocate(self, request: Request) -> bool:
        if not (self.fits(request) and super().allocate(request)):
            return False
        self._reserved[request.id] = most = self._most(request)
        self._total += most
        self._held += len(request.pages)
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        before = len(request.pages)
        grown = super().grow(request, ahead)
        self._held += len(request.pages) - before
        return grown

    def free(self, request: Request) -> None:
        self._total -= self._reserved.pop(request.id, 0)
        self._held -= len(request.pages)
        super().free(request)

    def _most(self, request: Request) -> int:
        return self.pool.pages_for(request.prompt_len + request.max_tokens)
