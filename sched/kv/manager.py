"""The KV cache manager, which is also the policy `memory: recompute`: allocation, growth and preemption of pages."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.kv.page_pool import OutOfPages, PagePool
from jaxspec.sched.plan import Transfer
from jaxspec.sched.request import Request
from jaxspec.sched.slots import MEMORIES, Policy, SlotContext


@MEMORIES.register("recompute")
class KVCacheManager(Policy):
    """Allocates pages for requests and takes them back. The scheduler decides which request to preempt.

    It is the base class of the other memory policies, and itself recomputes: a preempted request keeps nothing, but its
    full pages stay in the prefix cache until they are reused.
    """

    #: Whether the KV of a preempted request can move to the host.
    can_swap: bool = False

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    @classmethod
    def build(cls, settings: Any, context: SlotContext) -> KVCacheManager:
        assert context.pool is not None
        return cls(context.pool)

    @property
    def host_usage(self) -> float:
        """Fraction of the host pages that hold KV."""
        return 0.0

    def missing_pages(self, request: Request, ahead: int = 0) -> int:
        """Pages to allocate for the request's tokens, pending drafts included, and `ahead` more."""
        return self.pool.pages_for(request.most_known + ahead) - len(request.pages)

    def begin_plan(self) -> None:
        """Called when the scheduler starts a new plan."""

    def transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """The plan's (offloads, uploads), to be carried out before its step."""
        return (), ()

    def swapping_in(self, request: Request) -> bool:
        """Whether this plan uploads the request's KV."""
        return False

    def swapping_out(self, request: Request) -> bool:
        """Whether this plan offloads the request's KV."""
        return False

    def worth_swapping(self, request: Request) -> bool:
        """Whether the request's KV would move to the host if it were preempted."""
        return False

    def fits(self, request: Request) -> bool:
        """Whether the request can be admitted given what admitted requests may still need."""
        return True

    def evict(self, request: Request) -> bool:
        """Preempt: take the request's pages. -> whether its KV is on the host now."""
        self.free(request)
        return False

    def allocate(self, request: Request) -> bool:
        """Allocate pages for all known tokens of a request without pages, cached ones first. False: too few free."""
        known = len(request.tokens)
        # At least one token is left to compute: its logits give the next one.
        cached = self.pool.match(request.tokens, known - 1, request.page_keys) if request.reuse_prefix else []
        try:
            fresh = self.pool.allocate(self.pool.pages_for(known) - len(cached))
        except OutOfPages:
            self.pool.release(cached)
            return False
        request.pages = cached + fresh
        request.registered = len(cached)
        request.computed = len(cached) * self.pool.page_size
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Allocate pages for the tokens, pending drafts included, and `ahead` more. False, and none taken: too few."""
        missing = self.missing_pages(request, ahead)
        if missing > 0:
            try:
                request.pages += self.pool.allocate(missing)
            except OutOfPages:
                return False
        return True

    def spare_tokens(self, request: Request) -> int:
        """Tokens that fit in the request's pages after its own and pending drafts."""
        return len(request.pages) * self.pool.page_size - request.most_known

    def commit(self, request: Request, computed: int) -> None:
        """The KV of the first `computed` tokens is stored. Full pages enter the prefix cache."""
        request.computed = computed
        full = computed // self.pool.page_size
        if full > request.registered:
            self.pool.register(request.tokens, request.pages, range(request.registered, full), request.page_keys)
            request.registered = full

    def free(self, request: Request) -> None:
        """Release all pages."""
        self.pool.release(request.pages)
        request.pages = []
        request.computed = 0
