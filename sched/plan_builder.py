"""Builds one plan: which requests run in the step, which are paused, preempted or swapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.sched.kv.wait_time import plan_swaps
from jaxspec.sched.plan import Lookahead, Plan, ScheduledRequest
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.token_budget import TokenBudget

if TYPE_CHECKING:
    from jaxspec.sched.scheduler import Scheduler


class PlanBuilder:
    """The decisions of one step, for a `Scheduler` whose queues it changes as it goes.

    `build` goes through the stages in this order: aging; pausing running requests for waiting ones that come first;
    swapping ahead of need; throttling; running requests take their share of the step; waiting requests are admitted;
    drafts get what is left. Every stage keeps to the token budget and the free pages.
    """

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._s, self._now = scheduler, now
        self._running, self._waiting = scheduler.running, scheduler.waiting
        self._kv, self._pool, self._order = scheduler.kv, scheduler.pool, scheduler.order
        self._budget = TokenBudget(scheduler.config)
        #: Running requests that wait for the results of a step under way: they keep slot and pages, and do not run.
        self._resting = {r.id for r in scheduler.running} - {r.id for r in scheduler.ready}
        self._decoding: int | None = None  # decoding requests that may still be scheduled; None: all
        self._scheduled: list[ScheduledRequest] = []
        self._preempted: list[Request] = []
        self._paused: list[Request] = []
        self._swapped_ahead: list[Request] = []  # moved to the host before their pages were needed

    def build(self, lookahead: Lookahead) -> Plan:
        """-> the plan; its `scheduled` is empty if there is nothing to run now."""
        self._promote_overdue()
        if self._order.preemptive:
            self._pause_for_waiting()
        if self._kv.can_swap and (self._waiting.num_swapped or self._waiting.num_paused):
            self._swap_ahead()

        self._decoding = lookahead.max_decoding
        throttle = self._s.pace.choose(self._active(), self._waiting.first(), self._now, lookahead.levels > 0)
        prefill_first = self._s.config.policy.prefill == "first"
        # A pace that throttles decides on prompts too: it knows which are overdue.
        free = prefill_first or self._s.pace.throttles
        self._budget.prompt_tokens = throttle.prompt_tokens if free else lookahead.prompt_tokens
        running = [r for r in self._service_order() if r.id not in throttle.throttled]
        self._run([r for r in running if not (prefill_first and r.decoding)])
        if not prefill_first:
            self._run_throttled_if_empty()
        self._admit_waiting()
        if prefill_first and not self._scheduled:
            self._run([r for r in running if r.decoding])
            self._run_throttled_if_empty()

        nodes = 0
        if lookahead.drafts and lookahead.levels:
            nodes = self._budget.allow_drafts(self._scheduled, lookahead, self._kv)
        preempted = (*self._swapped_ahead, *self._preempted)
        return Plan(tuple(self._scheduled), preempted, tuple(self._paused), *self._kv.transfers(), nodes)

    # -- stages ----------------------------------------------------------------------------------------------------

    def _promote_overdue(self) -> None:
        """Aging: requests that have waited too long go first from now on."""
        aging, seconds = self._s.aging, self._s.aging_seconds
        if aging is not None and seconds is not None:
            for request in self._waiting.overdue(seconds, self._now):
                aging.promote(request)
                self._waiting.move(request)

    def _pause_for_waiting(self) -> None:
        """Give waiting requests the slots of running ones that come after them, while the step has tokens for them.

        If slot, pages and tokens are free, `_admit_waiting` admits them after the running requests got their share.
        """
        if self._waiting.first() is None:
            return
        key, tokens = self._order.key, self._s.config.max_num_batched_tokens
        rivals = [
            (key(r), r.number, r) for r in self._active() if r.recompute_until is None and self._order.preemptible(r)
        ]
        rivals.sort(key=lambda rival: rival[:2])
        while not self._preempted and (head := self._next_waiting()) is not None:
            first = key(head)
            after = [r for place, _, r in rivals if first < place]
            load = sum(r.remaining_known for r in self._active())
            if not after or load - sum(r.remaining_known for r in after if not r.decoding) >= tokens:
                return
            lacking = self._kv.missing_pages(head) - self._pool.num_free - self._waiting.paused_pages + len(head.pages)
            swapped = head.status is RequestStatus.SWAPPED
            if swapped:
                lacking += len(self._running)
                if lacking <= 0:
                    return  # `_swap_ahead` uploads it while others run; it competes for a slot after that
            elif self._free_slots() > 0:
                if lacking <= 0 and load < tokens:
                    return
                if self._start(head):
                    continue
            if lacking > sum(len(r.pages) for r in after):
                return  # even all of their pages would not suffice
            rivals.pop()
            self._pause(after[-1])
            if not swapped:
                self._start(head)

    def _swap_ahead(self) -> None:
        """Move KV to the host before its pages are needed, and back before its request's turn (ALISE, Algorithm 2)."""
        s = self._s
        coming, going = plan_swaps(
            self._running, self._waiting, self._kv, self._order.key, s.runtime, self._free_slots(),
            s.aging_seconds, s.config.costs, s.config.swap_pages, self._now,
        )  # fmt: skip
        spare = len(self._running)  # pages by which running requests may grow in this step
        for request in going:
            if self._kv.worth_swapping(request):  # otherwise it keeps its pages while it can
                self._preempt(request, self._swapped_ahead)
        for request in coming:
            if request is self._waiting.first():
                came = self._allocate(request, spare)
            else:
                came = self._kv.missing_pages(request) + spare <= self._pool.num_free and self._kv.allocate(request)
            if not came:
                return
            self._waiting.change(request, RequestStatus.PAUSED)

    def _service_order(self) -> list[Request]:
        """The running requests in the order in which they take tokens: decoding is never delayed by prefill."""
        if self._order.preemptive:
            return sorted(self._active(), key=lambda r: (not r.decoding, self._rank(r)))
        return sorted(self._active(), key=lambda r: not r.decoding)

    def _run(self, requests: Sequence[Request]) -> None:
        """Let running requests take their share of the step, in this order."""
        for request in requests:
            if request.decoding and self._decoding == 0:
                continue
            if self._reserve(request) and (share := self._budget.take(request)):
                self._scheduled.append(share)
                if self._decoding is not None and share.decodes:
                    self._decoding -= 1

    def _run_throttled_if_empty(self) -> None:
        """If all requests that were to run lost their pages, run throttled and waiting prompts instead."""
        if self._preempted and not self._scheduled:
            self._budget.prompt_tokens = None
            self._run(self._service_order())

    def _admit_waiting(self) -> None:
        """Admit waiting requests while there are slots, pages and tokens.

        A step that ran out of pages admits none, so a plan's preempted requests are never in its step; only if the
        step is empty, the request for which the pages were taken is admitted.
        """
        while self._budget and not (self._preempted and self._scheduled):
            # Slots come first: dynamic batching has to see an empty queue.
            if self._free_slots() < 1 or (request := self._next_waiting()) is None:
                return
            if request in self._paused or request in self._swapped_ahead or not self._admit(request):
                return
            if share := self._budget.take(request):
                self._scheduled.append(share)

    # -- slots and pages -------------------------------------------------------------------------------------------

    def _free_slots(self) -> int:
        waiting = self._waiting
        return self._s.batching.free_slots(len(self._running), len(waiting), waiting.oldest, self._now)

    def _next_waiting(self) -> Request | None:
        """The first waiting request; if its KV does not fit next to others', the first one that has its pages."""
        head = self._waiting.first()
        if head is None or head.status is RequestStatus.PAUSED or self._kv.fits(head):
            return head
        return self._waiting.first_paused()

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot. False: no pages, or its KV is not on the device and others can run."""
        if self._scheduled and (request.status is RequestStatus.SWAPPED or self._kv.swapping_in(request)):
            return False
        return self._start(request)

    def _start(self, request: Request) -> bool:
        """Give a waiting request a slot if there are pages for it."""
        if not self._allocate(request, 0):
            return False
        s = self._s
        if request.first_scheduled is None:
            request.first_scheduled = self._now
            request.cached_tokens = min(request.computed, request.prompt_len)
            self._order.started(request)
            if request.reuse_prefix and self._pool.enable_prefix_caching:
                s.prefix_queries += len(request.tokens)
                s.prefix_hits += request.computed
        self._waiting.remove(request)
        s.batching.admitted()
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        return True

    def _allocate(self, request: Request, spare: int) -> bool:
        """Allocate a waiting request's pages so that `spare` stay free, preempting paused requests if needed."""
        kv, waiting = self._kv, self._waiting
        get = kv.grow if request.status is RequestStatus.PAUSED else kv.allocate
        while (spare and kv.missing_pages(request) + spare > self._pool.num_free) or not get(request):
            last = waiting.last_paused()
            if last is None or last is request:
                return False
            free = self._pool.num_free + waiting.paused_pages - len(request.pages)
            if kv.missing_pages(request) + spare > free:
                return False  # even all paused requests' pages would not suffice
            self._preempt(last, self._preempted)
        return True

    def _reserve(self, request: Request) -> bool:
        """Allocate a running request's pages for its known tokens. False: it was preempted itself, or it waits for the
        pages of requests whose step is under way."""
        while request.status is RequestStatus.RUNNING:
            if self._kv.grow(request):
                return True
            victim = self._waiting.last_paused() or self._last_running()
            if victim is request and self._resting:
                return False
            self._preempt(victim, self._preempted)
        return False

    def _last_running(self) -> Request:
        """The running request to preempt first: the last in order, or else the last admitted."""
        active = self._active()
        return max(active, key=self._rank) if self._order.preemptive else active[-1]

    def _active(self) -> list[Request]:
        """The running requests that this plan may schedule, or preempt."""
        return [r for r in self._running if r.id not in self._resting] if self._resting else self._running

    def _rank(self, request: Request) -> tuple[bool, Any, int]:
        """Sort key of a running request: those that keep their slots come first."""
        return self._order.preemptible(request), self._order.key(request), request.number

    def _pause(self, request: Request) -> None:
        """Take a running request's slot; it keeps its pages."""
        s = self._s
        self._running.remove(request)
        request.status = RequestStatus.PAUSED
        request.pauses += 1
        s.num_pauses += 1
        self._waiting.push(request, self._now)
        self._paused.append(request)

    def _preempt(self, request: Request, preempted: list[Request]) -> None:
        """Take a running or paused request's pages and list it in `preempted`."""
        s = self._s
        preempted.append(request)
        computed, arriving = request.computed, self._kv.swapping_in(request)
        running = request.status is RequestStatus.RUNNING
        if running:
            self._running.remove(request)
            s.batching.sent_back()
        swapped = self._kv.evict(request)
        status = RequestStatus.SWAPPED if swapped else RequestStatus.WAITING
        if running:
            request.status = status
            self._waiting.push(request, self._now)
        else:
            self._waiting.change(request, status)
        if arriving:
            return  # its KV has not left the host
        if not swapped:
            request.recompute_until = max(request.recompute_until or 0, computed)
        request.preemptions += 1
        s.num_preemptions += 1
        s.num_swaps += swapped
