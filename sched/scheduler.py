"""The host scheduler: a state machine from arrivals, outcomes and cancellations to plans. Time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxspec.sched.budget import Budget
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.order import Fcfs
from jaxspec.sched.pages import OutOfPages, PagePool
from jaxspec.sched.plan import Lookahead, Outcome, Plan, Work
from jaxspec.sched.request import Request, State

NO_DRAFTS = Lookahead()


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class Scheduler:
    """Continuous batching with chunked prefill, admission by free pages and preemption by recompute.

    A request holds pages for all its known tokens from its admission on, so only decoding asks for more. When none is
    free, the last admitted request gives its pages up and is computed anew later. The first admitted one is never
    touched as long as others run, and alone it fits (`add` sees to that): so it ends, and the next one is first.

    `plan` and `update` alternate; `add` and `cancel` may come at any time between them.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.waiting = Fcfs()
        #: In the order of admission.
        self.running: list[Request] = []
        self.num_preemptions = 0
        #: Tokens of requests looked up in the prefix cache at their first admission, and those of them found there.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._requests: dict[str, Request] = {}
        self._in_flight: Plan | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request, now: float) -> None:
        """Queue a new request. Raises `ValueError` if it could never run to its end, `QueueFull` if too many wait."""
        longest = request.prompt_len + request.max_tokens
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already here")
        if request.prompt_len < 1 or request.prompt_len != len(request.tokens) or request.max_tokens < 1:
            raise ValueError("a request starts with a prompt of at least one token and asks for at least one more")
        if longest > self.config.max_model_len:
            raise ValueError(f"prompt and max_tokens are {longest} tokens, the limit is {self.config.max_model_len}")
        if self.pool.pages_for(longest) > self.pool.num_pages:
            room = self.pool.num_pages * self.pool.page_size
            raise ValueError(f"prompt and max_tokens are {longest} tokens, the KV pool holds {room}")
        if self.config.max_waiting is not None and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting")
        self._requests[request.id] = request
        self.waiting.append(request)

    def cancel(self, request_id: str, now: float) -> bool:
        """Drop a request and free its pages; False if it is not here. A step in flight may still write to them: what is
        planned later runs later, so nobody reads what it wrote."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def plan(self, now: float, lookahead: Lookahead = NO_DRAFTS) -> Plan:
        """What to run next; its `work` is empty if there is nothing to do. Else `update` must precede the next plan.

        Drafts get what is left of the step, never a page that would have to be taken from a request.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan has not been answered by update()")
        budget = Budget(self.config)
        work: list[Work] = []
        preempted: list[Request] = []

        for request in self.waiting.service(self.running):
            if self._reserve(request, preempted) and (share := budget.take(request)):
                work.append(share)

        # Nobody is admitted in a step that ran out of pages: so a plan's preempted requests are never in its work.
        while budget and not preempted and (request := self._admit(now)):
            if share := budget.take(request):
                work.append(share)

        if lookahead.drafts and lookahead.levels:
            self._allow_drafts(work, budget, lookahead)
        plan = Plan(tuple(work), tuple(preempted))
        self._in_flight = plan if work else None
        return plan

    def wake(self, now: float) -> float | None:
        """The earliest later time at which `plan` may have work although nothing happens until then; None: no such."""
        return None

    def predicted(self, request_id: str, length: float, now: float) -> bool:
        """Take in a length prediction, in output tokens, that comes after its request; False if that is not here."""
        if (request := self._requests.get(request_id)) is None:
            return False
        request.predicted_len = length
        return True

    def update(self, plan: Plan, outcomes: Sequence[Outcome], now: float, seconds: float = 0.0) -> None:
        """Take in what `plan` gave, `outcomes` in the order of its work, and the seconds that it took in all.

        Raises `ValueError` if they don't fit it.
        """
        if plan.work and plan is not self._in_flight:
            raise ValueError("not the plan in flight")
        if len(outcomes) != len(plan.work):
            raise ValueError(f"{len(outcomes)} outcomes for {len(plan.work)} pieces of work")
        for work, outcome in zip(plan.work, outcomes, strict=True):
            if work.request.state is State.RUNNING:  # else it was cancelled meanwhile
                self._advance(work, outcome)
        self._in_flight = None

    def _advance(self, work: Work, outcome: Outcome) -> None:
        request, new = work.request, outcome.tokens
        # Of the new tokens all but the last were drafts: their KV is committed along with that of the known ones.
        computed = work.start + work.count + max(0, len(new) - 1)
        if outcome.finish_reason is None:
            if bool(new) != work.samples:
                raise ValueError(f"request {request.id!r}: {len(new)} tokens from work that samples: {work.samples}")
            if request.output_len + len(new) >= request.max_tokens:
                raise ValueError(f"request {request.id!r} goes on after its max_tokens of {request.max_tokens}")
        if computed > len(request.pages) * self.pool.page_size:
            raise ValueError(f"request {request.id!r}: more KV committed than its pages hold")
        request.tokens += new
        request.computed = computed
        full = computed // self.pool.page_size
        if full > request.registered:
            self.pool.register(request.tokens, request.pages, range(request.registered, full), request.page_keys)
            request.registered = full
        if outcome.finish_reason is not None:
            self._finish(request)

    def _allow_drafts(self, work: list[Work], budget: Budget, lookahead: Lookahead) -> None:
        """Share what the step has left among the requests that decode, and find pages for what they may accept."""
        decoding = [i for i, w in enumerate(work) if w.count == 1 and w.samples and w.request.decoding]
        for rank, i in enumerate(decoding):
            request = work[i].request
            others = len(decoding) - rank
            drafts = min(lookahead.drafts, budget.tokens // others, budget.slots // others)
            levels = min(lookahead.levels, drafts, request.max_tokens - request.output_len - 1)
            missing = self.pool.pages_for(len(request.tokens) + levels) - len(request.pages)
            if levels > 0 and missing > 0:
                try:
                    request.pages += self.pool.allocate(missing)
                except OutOfPages:
                    levels = len(request.pages) * self.pool.page_size - len(request.tokens)
            if levels > 0:
                work[i] = replace(work[i], drafts=drafts, levels=levels)
                budget.tokens -= drafts
                budget.slots -= drafts

    def _reserve(self, request: Request, preempted: list[Request]) -> bool:
        """See that a running request has pages for its known tokens; False if it was preempted for lack of them."""
        while request.state is State.RUNNING:
            missing = self.pool.pages_for(len(request.tokens)) - len(request.pages)
            if missing <= 0:
                return True
            try:
                request.pages += self.pool.allocate(missing)
            except OutOfPages:
                victim = self.waiting.victim(self.running)
                self._preempt(victim)
                preempted.append(victim)
        return False

    def _admit(self, now: float) -> Request | None:
        """Move the first waiting request to the running ones; None if none waits or its seat or pages are not free."""
        request = self.waiting.first()
        if request is None or len(self.running) >= self.config.max_num_seqs:
            return None
        known = len(request.tokens)
        # At least one token is left to compute: its logits give the next one.
        cached = self.pool.match(request.tokens, known - 1, request.page_keys) if request.reuse_prefix else []
        try:
            fresh = self.pool.allocate(self.pool.pages_for(known) - len(cached))
        except OutOfPages:
            self.pool.release(cached)
            return None
        request.pages = cached + fresh
        request.registered = len(cached)
        request.computed = len(cached) * self.pool.page_size
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = request.computed
            if request.reuse_prefix and self.pool.prefix_caching:
                self.prefix_queries += known
                self.prefix_hits += request.computed
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        return request

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue. Its full pages stay findable until somebody needs them."""
        self._stop(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(request)

    def _finish(self, request: Request) -> None:
        del self._requests[request.id]
        if request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self._stop(request)
        request.state = State.FINISHED

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages = []
        request.computed = 0
