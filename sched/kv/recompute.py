"""The KV of requests in the page pool: how it comes there, grows, and is given up."""

from __future__ import annotations

from jaxspec.sched.kv.page_pool import OutOfPages, PagePool
from jaxspec.sched.plan import Transfer
from jaxspec.sched.request import Request


class KVCacheManager:
    """Recompute: a request that has to go leaves nothing behind but full pages, findable until somebody needs them.

    Who has to go is the scheduler's to say.
    """

    #: Whether pages may be taken from a request that has been let in, and whether its KV may then go to the host.
    can_preempt: bool = True
    can_swap: bool = False

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    @property
    def host_usage(self) -> float:
        """Fraction of the host pages that hold KV."""
        return 0.0

    def missing_pages(self, request: Request, ahead: int = 0) -> int:
        """Pages that the request lacks for its known tokens and `ahead` more."""
        return self.pool.pages_for(len(request.tokens) + ahead) - len(request.pages)

    def begin_plan(self) -> None:
        """A new plan is made."""

    def transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What has to be moved out and in before the plan that is now ready."""
        return (), ()

    def swapping_in(self, request: Request) -> bool:
        """Whether the request's KV comes from the host with this plan."""
        return False

    def swapping_out(self, request: Request) -> bool:
        """Whether it goes to the host with this plan."""
        return False

    def worth_swapping(self, request: Request) -> bool:
        """Whether a request that had to go would leave its KV on the host."""
        return False

    def fits(self, request: Request) -> bool:
        """Whether a request may be let in as far as the pages of others go."""
        return True

    def evict(self, request: Request) -> bool:
        """Take a request's pages; -> whether its KV is on the host now."""
        self.free(request)
        return False

    def allocate(self, request: Request) -> bool:
        """Pages for all known tokens of a request that has none, cached ones first; False if they are not there."""
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
        """Pages for known tokens and `ahead` more; False if they are not there, and then none is taken."""
        missing = self.missing_pages(request, ahead)
        if missing > 0:
            try:
                request.pages += self.pool.allocate(missing)
            except OutOfPages:
                return False
        return True

    def spare_tokens(self, request: Request) -> int:
        """Tokens beyond the known ones that the request's pages hold."""
        return len(request.pages) * self.pool.page_size - len(request.tokens)

    def commit(self, request: Request, computed: int) -> None:
        """The KV of the first `computed` tokens is there. Full pages become findable."""
        request.computed = computed
        full = computed // self.pool.page_size
        if full > request.registered:
            self.pool.register(request.tokens, request.pages, range(request.registered, full), request.page_keys)
            request.registered = full

    def free(self, request: Request) -> None:
        """Give all pages up."""
        self.pool.release(request.pages)
        request.pages = []
        request.computed = 0
