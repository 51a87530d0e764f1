"""The host scheduler: a state machine from arrivals, results and cancellations to plans. Time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Protocol

from jaxspec.sched import length
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.order.aging import Aging
from jaxspec.sched.order.order import Order
from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.plan_builder import PlanBuilder
from jaxspec.sched.request import UNKNOWN, Request, RequestStatus
from jaxspec.sched.slots import BATCHINGS, MEMORIES, ORDERS, PACES, PREDICTORS, Need, SlotContext
from jaxspec.sched.timing import ResponseTimes, Runtime
from jaxspec.sched.waiting_queue import WaitingQueue

NO_DRAFTS = Lookahead()


class SchedulerObserver(Protocol):
    """Is told of a scheduler's events, for recordings."""

    def added(self, request: Request, now: float) -> None:
        """A request was queued."""
        ...

    def planned(self, plan: Plan, now: float, lookahead: Lookahead) -> None:
        """A plan was made; its `scheduled` may be empty."""
        ...

    def updating(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float) -> None:
        """The results of a plan are about to be processed."""
        ...

    def restarted(self) -> None:
        """After a failure, plans without results have been dropped."""
        ...


#: Steps full of prompt tokens for which requests may wait before their order matters.
_FEW_STEPS = 16


class QueueFull(RuntimeError):
    """Too many requests are waiting. `retry_after`: seconds in which there should be places again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Scheduler:
    """Continuous batching with chunked prefill, admission by free pages, and preemption; policies decide who is next.

    An admitted request holds pages for all its known tokens, so only decoding needs more. When no page is free, a
    request is preempted: a paused one if there is any, else the running one admitted last. Its KV moves to the host or
    is recomputed later (`policy.memory`; with defer, this takes outputs longer than predicted). The request admitted
    first is never preempted while others run, and alone it fits (`add` checks that). So it finishes, and the next one
    is first: every request finishes.

    If the order is preemptive, waiting requests take the slots of running ones that come after them. Those are paused:
    they keep their pages until others need them. Then the last in order is preempted. A preempted request that runs
    again is not paused before it produces a token, so recomputation always makes progress. A swapped request's KV is
    uploaded during steps of other requests before its turn, and it gets a slot in the step after.

    `plan` and `update` alternate, unless `advance` allows the next plan before a step's results are here; `add`,
    `cancel` and `predicted` may come at any time between them. No method looks at all waiting requests: O(n log n) for
    n running requests, O(n + log w) per change of status, with w waiting. An order that learns may sort the queue again
    (`Order.rekeyed`).
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.runtime = Runtime(config.costs)
        #: How output lengths are distributed, learned from requests that have ended.
        self.lengths = LengthDistribution()
        self._responses = ResponseTimes(config.max_num_seqs)
        self._context = SlotContext(
            config.policy, config.max_num_seqs, pool, config.host_pages, config.exact_swap, config.costs,
            config.times, self.runtime, self.lengths, self._responses,
        )  # fmt: skip
        self._lengths = PREDICTORS.build(self._context)
        self.aging_seconds = None if config.policy.aging_ms is None else config.policy.aging_ms / 1000
        self._begin()
        self.observers: list[SchedulerObserver] = []
        #: Preemptions (a request lost its pages), those of them by swapping, and pauses (a request lost its slot).
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_pauses = 0
        #: Tokens computed again after preemptions, and their share of the steps' seconds.
        self.recomputed_tokens = 0
        self.recompute_seconds = 0.0
        #: Tokens looked up in the prefix cache at the first admission of requests, and tokens found there.
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._numbers = count()

    def _begin(self) -> None:
        """Build the policies, without any request."""
        self.order: Order = ORDERS.build(self._context)
        self.batching, self.pace = BATCHINGS.build(self._context), PACES.build(self._context)
        self.kv = MEMORIES.build(self._context)
        policies = self.order, self.batching, self.pace, self.kv, self._lengths
        self._learns_runtime = any(Need.RUNTIME in policy.needs for policy in policies)
        self.aging: Aging | None = None
        if self.aging_seconds is not None:
            self.order = self.aging = Aging(self.order)
        #: All requests that don't run, paused ones included.
        self.waiting = WaitingQueue(self.order.key)
        #: In the order of admission.
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        #: Plans without results, the oldest first.
        self._in_flight: deque[Plan] = deque()
        self._may_plan = True
        #: Requests whose next tokens only the results of a step under way tell.
        self._held: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that don't run, paused ones included."""
        return len(self.waiting)

    @property
    def num_paused(self) -> int:
        """Waiting requests that hold pages."""
        return self.waiting.num_paused

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is on the host."""
        return self.waiting.num_swapped

    @property
    def host_usage(self) -> float:
        """Fraction of the host pages that hold KV."""
        return self.kv.host_usage

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self.running)

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return max(0, self.config.max_num_seqs - len(self.running))

    @property
    def ready(self) -> list[Request]:
        """Running requests that the next plan may schedule: not those held by `advance`, nor those whose last token may
        be among the ones being sampled."""
        return [r for r in self.running if r.id not in self._held and r.most_output < r.max_tokens]

    @property
    def up_next(self) -> list[Request]:
        """Running requests, and the first waiting one: those that the next plan looks at first."""
        first = self.waiting.first()
        return [*self.running] if first is None else [*self.running, first]

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._requests)

    # -- events ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a new request. Raises `ValueError` if it could never finish, `QueueFull` if too many wait."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already here")
        self.config.check(request, self.pool)
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            raise QueueFull(f"{len(self.waiting)} requests are waiting")
        if request.predicted_len is None:
            request.predicted_len = self._lengths.predict(request)
        else:
            length.check(request.predicted_len)
        if request.predicted_len is not None:
            self._first_predicted(request, request.predicted_len)
            if request.resumed:
                request.predicted_len = length.corrected(request.predicted_len, request)
        request.number = next(self._numbers)
        if not self._requests:
            self.order.begins()
        self._responses.arrived(len(self.waiting))
        self.waiting.push(request, now - request.waited)
        self._requests[request.id] = request
        self._requeue()
        for observer in self.observers:
            observer.added(request, now)

    def cancel(self, request_id: str, now: float) -> bool:
        """Drop a request and free its pages. False: unknown id.

        A step in flight may still write to its pages. Later plans run after that step, so the writes are never read.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.lengths.ended(request, False)
        self._end(request, RequestStatus.CANCELLED)
        return True

    def restart(self, requests: Sequence[Request], now: float) -> None:
        """After a failure, whatever state it left: forget all plans, pages and queues, and queue these requests with
        their tokens and without KV, in the order of their arrival. What order, batching, pace and memory policy have
        learned is lost. The wait of those that have run begins now."""
        self.pool.clear()
        self._begin()
        for request in sorted(requests, key=lambda r: r.number):
            self.num_preemptions += request.computed > 0
            request.lose_kv()
            self.waiting.push(request, request.arrival - request.waited if request.first_scheduled is None else now)
            self._requests[request.id] = request
        for observer in self.observers:
            observer.restarted()

    def predicted(self, request_id: str, tokens: float, now: float, again: bool = False) -> bool:
        """Use a length prediction, in output tokens, that arrives after its request. False: unknown id.

        `again`: it knows part of the output. So it is not the first prediction even if there was none, and one that
        does not know the output no longer replaces it. Raises `ValueError` unless it is positive and finite.
        """
        length.check(tokens)
        if (request := self._requests.get(request_id)) is None:
            return False
        if request.first_prediction is None and not again:
            self._first_predicted(request, tokens)
        if again:
            request.repredicted.append((request.output_len, max(tokens - request.output_len, 1.0)))
        elif request.repredicted:
            return True
        request.predicted_len = length.corrected(tokens, request)
        self.waiting.move(request)
        return True

    def _first_predicted(self, request: Request, tokens: float) -> None:
        request.first_prediction = tokens
        low, high = (self.lengths.quantile(request, share, at_arrival=True) for share in (0.5, 0.9))
        request.predicted_quantiles = low, high

    def plan(self, now: float, lookahead: Lookahead = NO_DRAFTS) -> Plan:
        """What to run next. If there is nothing to do, `scheduled` is empty.

        Before the next plan, `update` reports the results, or `advance` that they will come later.

        Drafts get what is left of the step, never a page that another request would have to lose.
        """
        if not self._may_plan:
            raise RuntimeError("the last plan has not been answered by update() or advance()")
        self.kv.begin_plan()
        plan = PlanBuilder(self, now).build(lookahead)
        if plan.scheduled:
            self._in_flight.append(plan)
            self._may_plan = False
        for observer in self.observers:
            observer.planned(plan, now, lookahead)
        return plan

    def advance(self, plan: Plan, hold: bool = False, drafted: Mapping[str, int] | None = None) -> None:
        """Let the next plan be made while the step of `plan`, the last one, is under way.

        Its requests are taken to get one token each, `UNKNOWN` until `update`, and up to `Request.pending_drafts` more.
        `drafted`: by request id, the most drafts that may be accepted, 0 for others; None: as many as `plan` allows.
        With `hold`, the requests are left out of plans until then instead.
        """
        if not self._in_flight or plan is not self._in_flight[-1] or self._may_plan:
            raise ValueError("not the last plan, or it was advanced already")
        self._may_plan = True
        for scheduled in plan.scheduled:
            request = scheduled.request
            if request.ended:
                continue
            if hold:
                self._held.add(request.id)
                continue
            if not scheduled.samples:
                request.computed = scheduled.end
                continue
            if request.tokens[-1] == UNKNOWN:
                raise ValueError(f"the step before, with request {request.id!r}, has no results yet")
            most = scheduled.levels if drafted is None else drafted.get(request.id, 0)
            request.computed, request.pending_drafts = len(request.tokens), most
            request.tokens.append(UNKNOWN)

    def order_matters(self, plan: Plan) -> bool:
        """Whether requests wait for more than their turn in the next few steps, so that the order decides which of them
        wait long. `plan`: the last one."""
        if not self.waiting:
            return False
        if len(self.running) + len(self.waiting) > self.config.max_num_seqs:
            return True
        budget = self.config.max_num_batched_tokens
        if plan.num_tokens < budget:  # pages, the batching or the pace keep requests from running
            return True
        return sum(len(r.tokens) - r.computed for _, r in self.waiting.longest()) > _FEW_STEPS * budget

    def update(self, plan: Plan, results: Sequence[RequestResult], now: float, seconds: float = 0.0) -> None:
        """Process the results of `plan`, the oldest without, in the order of its `scheduled`. Those of requests that
        have ended meanwhile are ignored.

        `seconds`: its time, drafting included. Raises `ValueError` if the results don't fit the plan.
        """
        if plan.scheduled and (not self._in_flight or plan is not self._in_flight[0]):
            raise ValueError("not the plan in flight")
        if len(results) != len(plan.scheduled):
            raise ValueError(f"{len(results)} results for {len(plan.scheduled)} scheduled requests")
        for observer in self.observers:
            observer.updating(plan, results, now, seconds)
        if self._learns_runtime:
            self.runtime.observe(plan, results, seconds)
        recomputed = sum(scheduled.recomputes for scheduled in plan.scheduled)
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            self._held.discard(scheduled.request.id)
            if not scheduled.request.ended:
                self._append(scheduled, result, now, seconds)
        self._requeue()
        if recomputed:
            self.recomputed_tokens += recomputed
            self.recompute_seconds += seconds * recomputed / plan.num_tokens
        if plan.scheduled:
            self._in_flight.popleft()
            self._may_plan = self._may_plan or not self._in_flight

    def wake(self, now: float) -> float | None:
        """The earliest later time at which `plan` may have work although nothing happens until then; None: no such."""
        wake = self.batching.wake(len(self.running), self.waiting.oldest)
        return wake if wake is None or wake > now else None

    def _requeue(self) -> None:
        for request in self.order.rekeyed():
            self.waiting.move(request)

    # -- results of a step -----------------------------------------------------------------------------------------

    def _append(self, scheduled: ScheduledRequest, result: RequestResult, now: float, seconds: float) -> None:
        request, new = scheduled.request, result.tokens
        known = scheduled.known
        # All new tokens but the last were drafts: their KV is committed together with that of the known tokens.
        computed = known + max(0, len(new) - 1)
        scheduled.check(result)
        if scheduled.samples:
            request.tokens[known:], request.pending_drafts = new, 0
        request.recomputed += scheduled.recomputes
        if request.pages:  # else a later plan has taken them
            if computed > len(request.pages) * self.pool.page_size:
                raise ValueError(f"request {request.id!r}: more KV committed than its pages hold")
            self.kv.commit(request, computed)
            if new:
                request.recompute_until = None
        if new and request.first_token is None:
            request.first_token = now
        if scheduled.decodes:
            request.attained += seconds
            request.proposed += result.proposed
            request.accepted += result.accepted
            self.order.observe(request, result, seconds)
        if result.finish_reason is not None:
            self.lengths.ended(request, result.finish_reason == "stop")
            if request.first_scheduled is not None:
                self._responses.ended(now - request.first_scheduled)
            self._end(request, RequestStatus.FINISHED)
            return
        if request.predicted_len is not None and request.output_len >= request.predicted_len:
            request.predicted_len = length.corrected(request.predicted_len, request)
        if request.status is not RequestStatus.RUNNING:  # a later plan has taken its slot
            self.waiting.move(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.id]
        self._held.discard(request.id)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv.free(request)
        if request.tokens[-1] == UNKNOWN:
            request.tokens.pop()
        request.status, request.pending_drafts = status, 0
        request.kept.clear()  # outdated entries of the queue may hold the request for a while
