"""The host scheduler: a state machine from arrivals, outcomes and cancellations to plans. Time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from jaxspec.sched import batching, order, pacing
from jaxspec.sched import kv as kv
from jaxspec.sched import length as predict
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.kv.wait_time import arrange
from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.timing import Runtime
from jaxspec.sched.token_budget import TokenBudget
from jaxspec.sched.waiting_queue import WaitingQueue

NO_DRAFTS = Lookahead()
NO_THROTTLE = pacing.Throttle()


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class Scheduler:
    """Steps with chunked prefill, admission by free pages, preemption; the policy's slots say who is next.

    A request holds pages for all its known tokens from its admission on, so only decoding asks for more. When none is
    free, a request gives its pages up: a paused one if there is any, else the running one admitted last. Its KV goes to
    the host and comes back, or is computed anew, as the memory has it; with `memory: defer` it never comes to that. The
    first admitted is never touched as long as others run, and alone it fits (`add` sees to that): so it ends, and the
    next one is first.

    Where the order preempts, requests that wait take the seats of running ones that come after them. Those are paused:
    they keep their pages while nobody needs them. Memory then is taken from the last in order. A request that has lost
    its pages keeps its next seat until it has written a token: so what is computed again is never all for nothing. One
    whose KV is on the host gets it back in a step of the others, before its turn, and its seat in the next.

    `plan` and `update` alternate; `add`, `cancel` and `predicted` may come at any time between them. None looks at all
    that wait: O(n log n) for the n that run, and O(n + log w) for each that changes its state, with w waiting.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.runtime = Runtime(config.costs)
        self.order = order.build(config.policy, self.runtime)
        self._aging: order.Aging | None = None
        self._aging_seconds: float | None = None
        if config.policy.aging_ms is not None:
            self.order = self._aging = order.Aging(self.order)
            self._aging_seconds = config.policy.aging_ms / 1000
        self._batching = batching.build(config.policy, config.max_num_seqs)
        self._throttle = pacing.build(config.policy, config.times)
        self._predictor = predict.build(config.policy)
        self._kv = kv.build(config, pool)
        self._learns = self._kv.can_swap or config.policy.order == "alise"
        #: All that don't run, paused ones included.
        self.waiting = WaitingQueue(self.order.key)
        #: In the order of admission.
        self.running: list[Request] = []
        #: Times that a request lost its pages, and times that one lost only its seat.
        self.num_preemptions = 0
        self.num_switches = 0
        #: Of the former, those in which its KV went to the host.
        self.num_swaps = 0
        #: What preemptions have cost so far: tokens computed again, and their share of the steps' seconds.
        self.recomputed_tokens = 0
        self.recompute_seconds = 0.0
        #: Tokens of requests looked up in the prefix cache at their first admission, and those of them found there.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._requests: dict[str, Request] = {}
        self._numbers = count()
        self._in_flight: Plan | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that don't run, paused ones included."""
        return len(self.waiting)

    @property
    def num_paused(self) -> int:
        return self.waiting.num_paused

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is on the host."""
        return self.waiting.num_swapped

    @property
    def host_usage(self) -> float:
        """Fraction of the host pages that hold KV."""
        return self._kv.host_usage

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    # -- events ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a new request. Raises `ValueError` if it could never run to its end, `QueueFull` if too many wait."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already here")
        self.config.check(request, self.pool)
        if self.config.max_queued_requests is not None and len(self.waiting) >= self.config.max_queued_requests:
            raise QueueFull(f"{len(self.waiting)} requests are waiting")
        if request.predicted_len is None:
            request.predicted_len = self._predictor.predict(request)
        else:
            predict.check(request.predicted_len)
        if request.predicted_len is not None:
            request.first_prediction = min(request.predicted_len, request.max_tokens)
        request.number = next(self._numbers)
        self._requests[request.id] = request
        self.waiting.push(request, now)

    def cancel(self, request_id: str, now: float) -> bool:
        """Drop a request and free its pages; False if it is not here. A step in flight may still write to them: what is
        planned later runs later, so nobody reads what it wrote."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def predicted(self, request_id: str, length: float, now: float) -> bool:
        """Take in a length prediction, in output tokens, that comes after its request; False if that is not here.

        Raises `ValueError` unless it is positive.
        """
        predict.check(length)
        if (request := self._requests.get(request_id)) is None:
            return False
        if request.first_prediction is None:
            request.first_prediction = min(length, request.max_tokens)
        request.predicted_len = predict.corrected(length, request)
        self.waiting.move(request)
        return True

    def update(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float = 0.0) -> None:
        """Take in what `plan` gave, `results` in the order of its work, and the seconds that it took, drafting
        included. Raises `ValueError` if they don't fit it."""
        if plan.scheduled and plan is not self._in_flight:
            raise ValueError("not the plan in flight")
        if len(results) != len(plan.scheduled):
            raise ValueError(f"{len(results)} results for {len(plan.scheduled)} pieces of work")
        if self._learns:
            self.runtime.observe(plan, results, seconds)
        recomputed = sum(scheduled.recomputes for scheduled in plan.scheduled)
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            if scheduled.request.status is RequestStatus.RUNNING:  # else it was cancelled meanwhile
                self._advance(scheduled, result, now, seconds)
        if recomputed:
            self.recomputed_tokens += recomputed
            self.recompute_seconds += seconds * recomputed / plan.num_tokens
        self._in_flight = None

    def wake(self, now: float) -> float | None:
        """The earliest later time at which `plan` may have work although nothing happens until then; None: no such."""
        wake = self._batching.wake(len(self.running), self.waiting.oldest)
        return wake if wake is None or wake > now else None

    # -- what to run -----------------------------------------------------------------------------------------------

    def plan(self, now: float, lookahead: Lookahead = NO_DRAFTS) -> Plan:
        """What to run next. If there is nothing to do, `scheduled` is empty; else `update` precedes the next plan.

        Drafts get what is left of the step, never a page that would have to be taken from a request.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan has not been answered by update()")
        self._kv.begin_plan()
        budget = TokenBudget(self.config)
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        paused: list[Request] = []
        ahead: list[Request] = []

        if self._aging is not None and self._aging_seconds is not None:
            for request in self.waiting.overdue(self._aging_seconds, now):
                self._aging.promote(request)
                self.waiting.move(request)
        if self.order.preemptive:
            self._switch(now, paused, preempted)
        if self._kv.can_swap and (self.waiting.num_swapped or self.waiting.num_paused):
            self._swap(now, ahead, preempted)

        throttle = (
            self._throttle.choose(self.running, self.waiting.first(), now, lookahead.levels > 0)
            if self._throttle
            else NO_THROTTLE
        )
        budget.prompt_tokens = throttle.prompt_tokens
        first = self.config.policy.prefill == "first"
        service = [r for r in self._service() if r.id not in throttle.throttled]
        if not first:
            self._fill(scheduled, service, budget, now, preempted)
            if preempted and not scheduled:
                self._fill_anyway(scheduled, budget, now, preempted)
        else:
            self._fill(scheduled, [r for r in service if not r.decoding], budget, now, preempted)

        # Nobody is admitted in a step that ran out of pages: so a plan's preempted requests are never in its work. Only
        # where nobody is left in it, the one for whom they were taken is let in.
        while budget and not (preempted and scheduled):
            if self._free_slots(now) < 1 or (request := self._next()) is None or request in paused or request in ahead:
                break  # the seats come first: a batch has to hear that nobody waits any more
            if not self._admit(request, now, preempted, alone=not scheduled):
                break
            if share := budget.take(request):
                scheduled.append(share)
        if first and not scheduled:
            self._fill(scheduled, [r for r in service if r.decoding], budget, now, preempted)
            if preempted and not scheduled:
                self._fill_anyway(scheduled, budget, now, preempted)

        if lookahead.drafts and lookahead.levels:
            budget.allow_drafts(scheduled, lookahead, self._kv)
        plan = Plan(tuple(scheduled), (*ahead, *preempted), tuple(paused), *self._kv.transfers())
        self._in_flight = plan if scheduled else None
        return plan

    def _fill(
        self,
        scheduled: list[ScheduledRequest],
        service: Sequence[Request],
        budget: TokenBudget,
        now: float,
        preempted: list[Request],
    ) -> None:
        """Let running requests take what they need of the step, in this order."""
        for request in service:
            if self._reserve(request, now, preempted) and (share := budget.take(request)):
                scheduled.append(share)

    def _fill_anyway(
        self, scheduled: list[ScheduledRequest], budget: TokenBudget, now: float, preempted: list[Request]
    ) -> None:
        """Where all that were to run lost their pages, those run that were to rest or wait."""
        budget.prompt_tokens = None
        self._fill(scheduled, self._service(), budget, now, preempted)

    def _service(self) -> list[Request]:
        """The running requests in the order in which a step is filled: decoding is never delayed by prefill."""
        rank = self._rank if self.order.preemptive else lambda _: 0
        return sorted(self.running, key=lambda request: (not request.decoding, rank(request)))

    def _switch(self, now: float, paused: list[Request], preempted: list[Request]) -> None:
        """Seat waiting requests in place of running ones that come after them, as far as the step has tokens for them.

        Where seat, pages and tokens are free it leaves that to `_admit`, when running requests have what they need.
        """
        if self.waiting.first() is None:
            return
        key, tokens = self.order.key, self.config.max_num_batched_tokens
        rivals = [
            (key(r), r.number, r) for r in self.running if r.recompute_until is None and self.order.preemptible(r)
        ]
        rivals.sort(key=lambda rival: rival[:2])
        while not preempted and (head := self._next()) is not None:
            after = [r for place, _, r in rivals if key(head) < place]
            load = sum(r.remaining_known for r in self.running)
            if not after or load - sum(r.remaining_known for r in after if not r.decoding) >= tokens:
                return
            lacking = self._kv.missing_pages(head) - self.pool.num_free - self.waiting.paused_pages + len(head.pages)
            swapped = head.status is RequestStatus.SWAPPED
            if swapped:
                lacking += len(self.running)
                if lacking <= 0:
                    return  # `_swap` brings it in while the others go on, and it competes for a seat after that
            elif self._free_slots(now) > 0:
                if lacking <= 0 and load < tokens:
                    return
                if self._enter(head, now, preempted):
                    continue
            if lacking > sum(len(r.pages) for r in after):
                return  # all that they have would not do
            rivals.pop()
            self._pause(after[-1], now)
            paused.append(after[-1])
            if not swapped:
                self._enter(head, now, preempted)

    def _swap(self, now: float, ahead: list[Request], preempted: list[Request]) -> None:
        """Move KV to the host ahead of need, and in from there ahead of its request's turn (ALISE's Algorithm 2)."""
        coming, going = arrange(
            self.running, self.waiting, self._kv, self.order.key, self.runtime, self._free_slots(now),
            self._aging_seconds, self.config.costs, self.config.swap_pages, now,
        )  # fmt: skip
        spare = len(self.running)  # pages by which they may grow in this step
        for request in going:
            if self._kv.worth_swapping(request):  # else it keeps its pages as long as it can
                self._preempt(request, now, ahead)
        for request in coming:
            if request is self.waiting.first():
                came = self._make_room(request, spare, now, preempted)
            else:
                came = self._kv.missing_pages(request) + spare <= self.pool.num_free and self._kv.allocate(request)
            if not came:
                return
            self.waiting.change(request, RequestStatus.PAUSED)

    def _free_slots(self, now: float) -> int:
        return self._batching.free_slots(len(self.running), len(self.waiting), self.waiting.oldest, now)

    def _next(self) -> Request | None:
        """The first waiting request; where there is no room for its KV beside others', the first that has its own."""
        head = self.waiting.first()
        if head is None or head.status is RequestStatus.PAUSED or self._kv.fits(head):
            return head
        return self.waiting.first_paused()

    def _admit(self, request: Request, now: float, preempted: list[Request], alone: bool) -> bool:
        """Give a waiting request a seat; False if its pages are not free or, unless it is `alone` in the step, its KV
        is still on the host or just coming from there."""
        if not alone and (request.status is RequestStatus.SWAPPED or self._kv.swapping_in(request)):
            return False
        return self._enter(request, now, preempted)

    def _make_room(self, request: Request, spare: int, now: float, preempted: list[Request]) -> bool:
        """See that a waiting request has its pages, those of paused ones included, and `spare` are left."""
        kv = self._kv
        get = kv.grow if request.status is RequestStatus.PAUSED else kv.allocate
        while (spare and kv.missing_pages(request) + spare > self.pool.num_free) or not get(request):
            last = self.waiting.last_paused() if kv.can_preempt else None
            if last is None or last is request:
                return False
            free = self.pool.num_free + self.waiting.paused_pages - len(request.pages)
            if kv.missing_pages(request) + spare > free:
                return False  # all of theirs would not do
            self._preempt(last, now, preempted)
        return True

    def _enter(self, request: Request, now: float, preempted: list[Request]) -> bool:
        """Seat the next request in line if there are pages for it."""
        if not self._make_room(request, 0, now, preempted):
            return False
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = request.computed
            if request.reuse_prefix and self.pool.enable_prefix_caching:
                self.prefix_queries += len(request.tokens)
                self.prefix_hits += request.computed
        self.waiting.remove(request)
        self._batching.admitted()
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        return True

    def _reserve(self, request: Request, now: float, preempted: list[Request]) -> bool:
        """See that a running request has pages for its known tokens; False if it was preempted for lack of them."""
        while request.status is RequestStatus.RUNNING:
            if self._kv.grow(request):
                return True
            self._preempt(self.waiting.last_paused() or self._last_running(), now, preempted)
        return False

    def _last_running(self) -> Request:
        """The running request that loses its pages first: it has the least to lose, or comes last in order."""
        return max(self.running, key=self._rank) if self.order.preemptive else self.running[-1]

    def _rank(self, request: Request) -> tuple[bool, Any, int]:
        """Where a running request stands among the running: those that keep their seats come before the others."""
        return self.order.preemptible(request), self.order.key(request), request.number

    # -- how requests change their state ---------------------------------------------------------------------------

    def _advance(self, scheduled: ScheduledRequest, result: RequestResult, now: float, seconds: float) -> None:
        request, new = scheduled.request, result.tokens
        # Of the new tokens all but the last were drafts: their KV is committed along with that of the known ones.
        computed = scheduled.start + scheduled.count + max(0, len(new) - 1)
        scheduled.check(result)
        if computed > len(request.pages) * self.pool.page_size:
            raise ValueError(f"request {request.id!r}: more KV committed than its pages hold")
        round_of_drafts = request.decoding
        request.tokens += new
        request.recomputed += scheduled.recomputes
        self._kv.commit(request, computed)
        if new:
            request.recompute_until = None
            if request.first_token is None:
                request.first_token = now
        if round_of_drafts:
            request.attained += seconds
            request.proposed += result.proposed
            request.accepted += result.accepted
            self.order.observe(request, result, seconds)
        if result.finish_reason is not None:
            self._finish(request)
        elif request.predicted_len is not None and request.output_len >= request.predicted_len:
            request.predicted_len = predict.corrected(request.predicted_len, request)

    def _pause(self, request: Request, now: float) -> None:
        """Take a running request's seat and leave it its pages."""
        self.running.remove(request)
        request.status = RequestStatus.PAUSED
        request.switches += 1
        self.num_switches += 1
        self.waiting.push(request, now)

    def _preempt(self, request: Request, now: float, preempted: list[Request]) -> None:
        """Take a running or paused request's pages. Full ones stay findable until somebody needs them."""
        preempted.append(request)
        computed, came, running = (
            request.computed,
            self._kv.swapping_in(request),
            request.status is RequestStatus.RUNNING,
        )
        if running:
            self.running.remove(request)
            self._batching.sent_back()
        swapped = self._kv.evict(request)
        status = RequestStatus.SWAPPED if swapped else RequestStatus.WAITING
        if running:
            request.status = status
            self.waiting.push(request, now)
        else:
            self.waiting.change(request, status)
        if came:
            return  # it has not left the host
        if not swapped:
            request.recompute_until = max(request.recompute_until or 0, computed)
        request.preemptions += 1
        self.num_preemptions += 1
        self.num_swaps += swapped

    def _finish(self, request: Request) -> None:
        del self._requests[request.id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._kv.free(request)
        self.order.forget(request)
        request.status = RequestStatus.FINISHED
