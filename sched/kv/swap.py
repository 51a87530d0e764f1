"""`memory: swap` and `auto`: KV moves to the host and back (ALISE §3.2)."""

from __future__ import annotations

from jaxspec.sched.kv.host_pages import HostPagePool
from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.kv.page_pool import OutOfPages, PagePool
from jaxspec.sched.plan import Transfer
from jaxspec.sched.request import Request
from jaxspec.sched.slots import MEMORIES, Need, SlotContext
from jaxspec.sched.timing import SwapCosts


@MEMORIES.register("swap")
class Swap(KVCacheManager):
    """Swaps a preempted request's KV to the host if it fits and, with `costs`, if that is faster than recomputing.

    Otherwise it recomputes, like `KVCacheManager`. Transfers are collected until the plan is ready: a request that
    is preempted again in the plan that uploads it simply stays on the host.
    """

    can_swap = True
    needs = frozenset({Need.HOST_MEMORY, Need.RUNTIME})
    #: Whether KV is swapped only where the costs say that this is faster.
    by_cost = False

    def __init__(self, pool: PagePool, host_pages: int, exact: bool, costs: SwapCosts | None) -> None:
        super().__init__(pool)
        self.host = HostPagePool(host_pages)
        self._exact, self._costs = exact, costs
        self._out: dict[str, Transfer] = {}
        self._in: dict[str, Transfer] = {}

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> KVCacheManager:
        """Without host pages, a manager that recomputes."""
        assert context.pool is not None
        if not context.host_pages:
            return KVCacheManager(context.pool)
        return cls(context.pool, context.host_pages, context.exact_swap, context.costs if cls.by_cost else None)

    @property
    def host_usage(self) -> float:
        return self.host.usage

    def begin_plan(self) -> None:
        self.host.settle()

    def transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        for transfer in self._in.values():
            self.host.release(transfer.request.host_pages)
            transfer.request.host_pages = []
        moved = tuple(t for t in self._in.values() if t.host)
        out = tuple(self._out.values())
        self._in.clear()
        self._out.clear()
        return out, moved

    def swapping_in(self, request: Request) -> bool:
        return request.id in self._in

    def swapping_out(self, request: Request) -> bool:
        return request.id in self._out

    def worth_swapping(self, request: Request) -> bool:
        pages = self.pool.pages_for(request.computed)
        if not 0 < pages <= self.host.num_free:
            return False
        return self._costs is None or self._costs.swap(pages) < self._costs.recompute(request.computed)

    def evict(self, request: Request) -> bool:
        if self._in.pop(request.id, None):  # it still holds its host pages
            self.pool.release(request.pages)
            request.pages = []
            return True
        host = self.host.allocate(self.pool.pages_for(request.computed)) if self.worth_swapping(request) else None
        if host is None:
            self.free(request)
            return False
        self._out[request.id] = Transfer(request, tuple(request.pages[: len(host)]), tuple(host))
        self.pool.release(request.pages)
        request.pages, request.host_pages = [], host
        request.swaps += 1
        return True

    def allocate(self, request: Request) -> bool:
        if not request.host_pages:
            return super().allocate(request)
        # Pages that are still in the prefix cache need not be moved.
        cached = self.pool.match(request.tokens, request.computed, request.page_keys) if request.reuse_prefix else []
        try:
            fresh = self.pool.allocate(self.pool.pages_for(len(request.tokens)) - len(cached))
        except OutOfPages:
            self.pool.release(cached)
            return False
        request.pages = cached + fresh
        request.registered = len(cached)
        here, total = len(cached), len(request.host_pages)
        moved = tuple(request.pages[here:total]), tuple(request.host_pages[here:])
        self._in[request.id] = Transfer(request, *moved)
        return True

    def commit(self, request: Request, computed: int) -> None:
        if self._exact or not request.swaps:
            super().commit(request, computed)
        else:
            request.computed = computed  # KV computed from inexact KV must not be shared either

    def free(self, request: Request) -> None:
        super().free(request)
        self.host.release(request.host_pages)
        request.host_pages = []


@MEMORIES.register("auto")
class SwapOrRecompute(Swap):
    """Swaps a request's KV where that is estimated to be faster than recomputing it."""

    needs = frozenset({Need.RUNTIME})
    by_cost = True
