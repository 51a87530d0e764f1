"""A discrete-event simulation of serving: the engine's own scheduler on a virtual clock, a cost model in the device's
place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np

from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cost import Cost, StepLoad
from jaxspec.sched.sim.link import Link
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import NONE, Slo


class Stuck(RuntimeError):
    """The scheduler holds requests, plans nothing, and waits for nothing: a policy's fault."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of each request, `[requests]` arrays in the workload's order; times in seconds from the start."""

    workload: Workload
    first_scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    #: How often it lost its pages, to the host or to be computed anew.
    preemptions: np.ndarray
    #: Draft tokens verified and accepted, and the rounds that verified some.
    drafted: np.ndarray
    accepted: np.ndarray
    rounds: np.ndarray
    steps: int
    #: How often a request was set aside with its KV kept, over all.
    pauses: int
    #: Seconds in which a step ran.
    busy: float
    #: How often KV went to the host, over all, pages moved there and back, and seconds for which steps waited for them.
    swaps: int = 0
    moved: int = 0
    stalled: float = 0.0
    #: Tokens computed again.
    recomputed: int = 0

    @property
    def jct(self) -> np.ndarray:
        """Job completion time, the end-to-end latency, in seconds."""
        return self.finished - self.workload.arrival

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds per output token after the first; NaN of requests with one token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.finished - self.first_token) / (self.workload.output - 1)
        return np.where(self.workload.output > 1, mean, np.nan)

    @property
    def met(self) -> np.ndarray:
        """Whether each request kept its target; true of those that have none, or one token."""
        target = self.workload.tpot
        return ~(self.tpot > target) if target is not None else np.ones(len(self.workload), bool)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last completion."""
        return float(self.finished.max() - self.workload.arrival[0]) if len(self.workload) else 0.0

    def ending(self, finished: np.ndarray) -> Served:
        """The same, but for when answers were given `[requests]`."""
        return replace(self, finished=finished)

    def throughput_at(self, share: float) -> float:
        """Requests a second from time 0 until this share of them was done.

        At a quarter, this is how SSJF's published experiments count throughput.
        """
        ends = np.sort(self.finished)
        done = int(share * (len(ends) - 1))
        return done / float(ends[done])


class Simulation:
    """Serves `workload` with `scheduler`, which must be empty.

    Step times that the scheduler's configuration holds learn from each step, as on the engine. Requests of a workload
    without targets of its own have those of `slo`.

    Each decoding request drafts a chain of `draft_length` tokens a round, `acceptance` says how many are right; 0: no
    drafting. Requests ask for just as many tokens as they will write. What a preempted one computes again shows in its
    later work, and what is moved to the host takes the time that the scheduler's costs say, beside the steps. Where the
    cost model knows a price of switching, one that is paused has its KV moved out, and in again when it goes on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        cost: Cost,
        acceptance: Acceptance | None = None,
        draft_length: int = 0,
        slo: Slo = NONE,
    ) -> None:
        if draft_length and acceptance is None:
            raise ValueError("draft_length needs an acceptance model")
        self.scheduler, self.workload, self.cost = scheduler, workload, cost
        self._acceptance, self._draft_length = acceptance, draft_length
        n = len(workload)
        # Lists where one number is read or written at a time: arrays would box each.
        self._left: list[int] = workload.output.tolist()
        self._slos, self._slo = workload.slos, slo
        self._max_tokens = workload.output.tolist()
        self._first_scheduled, self._first_token, self._finished = ([nan] * n for _ in range(3))
        self._preemptions, self._drafted, self._accepted, self._rounds = ([0] * n for _ in range(4))
        self._steps = self._pauses = 0
        self._busy = self._stalled = 0.0
        costs = scheduler.config.costs
        self._link = Link(costs) if scheduler.config.host_pages and costs is not None else None
        self._away: set[str] = set()
        self._outcomes: dict[tuple[int, int, int, bool], RequestResult] = {}

    def run(self, advance: Callable[[], None] = lambda: None) -> Served:
        """To the end; `advance` is called at each whole percent of the requests done. Raises `Stuck`, and what
        `Scheduler.add` raises for a request that can never be served."""
        workload, scheduler = self.workload, self.scheduler
        arrival, input_len = workload.arrival.tolist(), workload.input.tolist()
        predicted = workload.predicted.tolist()
        n, now, coming, done = len(workload), 0.0, 0, 0
        while coming < n or scheduler.has_work:
            while coming < n and arrival[coming] <= now:
                scheduler.add(self._request(coming, input_len[coming], arrival[coming], predicted[coming]), now)
                coming += 1
            plan = scheduler.plan(now, self._lookahead(now))
            if self._link is not None:
                self._link.start(plan, now)
            if not plan.scheduled:
                if plan.preempted or plan.paused or plan.upload:
                    continue  # room was made: the next plan has work, as the engine's next turn would
                now = self._next_event(now, arrival[coming] if coming < n else None)
                continue
            self._pauses += len(plan.paused)
            seconds, service = self._time(plan, now)
            if self._link is not None:
                begin = self._link.ready(plan, now)
                self._stalled += begin - now
                now = begin
            now += seconds
            self._steps += 1
            self._busy += seconds
            ended = self._answer(plan, now, service)
            for _ in range(100 * done // n, 100 * (done + ended) // n):
                advance()
            done += ended
        as_float, as_int = (lambda v: np.array(v, float)), (lambda v: np.array(v, int))
        return Served(
            workload, as_float(self._first_scheduled), as_float(self._first_token), as_float(self._finished),
            as_int(self._preemptions), as_int(self._drafted), as_int(self._accepted), as_int(self._rounds),
            self._steps, self._pauses, self._busy, scheduler.num_swaps, self._link.moved if self._link else 0,
            self._stalled, scheduler.recomputed_tokens,
        )  # fmt: skip

    def _request(self, i: int, input_len: int, arrival: float, predicted: float) -> Request:
        request = Request(str(i), input_len, [0] * input_len, self._max_tokens[i], arrival)
        request.true_len = self._left[i]
        if self._acceptance is not None:
            request.true_acceptance = self._acceptance.share(i, self._draft_length)
        request.slo = self._slo if self._slos is None else self._slos[i]
        if not isnan(predicted):  # else the scheduler's predictor has the word
            request.predicted_len = predicted
        return request

    def _next_event(self, now: float, arrival: float | None) -> float:
        """When there may be work again. Requests that wait with nothing running wait for an arrival or for a time."""
        wake = self.scheduler.wake(now)
        times = [t for t in (arrival, wake) if t is not None and t > now]
        if not times:
            raise Stuck(f"{self.scheduler.num_waiting} requests wait at {now:.6f} s and nothing will happen")
        return min(times)

    def _lookahead(self, now: float) -> Lookahead:
        return Lookahead(self._draft_length, self._draft_length)

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        """Seconds from `now` until the next plan, and those of them that count as service: here all."""
        load = self._load(plan)
        seconds = self.cost.seconds(load)
        if (times := self.scheduler.config.times) is not None:
            plain = replace(load, drafting=0, levels=0, swapped=0) if load.levels or load.swapped else load
            times.observe(load.tokens, self.cost.seconds(plain))
        return seconds, seconds

    def _load(self, plan: Plan) -> StepLoad:
        tokens = starting = context = drafting = levels = 0
        for scheduled in plan.scheduled:
            tokens += scheduled.count
            context += scheduled.start
            if not scheduled.start:
                starting += 1
            if scheduled.levels:
                drafting += 1
                tokens += scheduled.levels
                if scheduled.levels > levels:
                    levels = scheduled.levels
        return StepLoad(tokens, starting, context, drafting, levels, self._swapped(plan))

    def _swapped(self, plan: Plan) -> int:
        """KV positions moved because requests were paused, and go on."""
        away, swapped = self._away, 0
        for request in plan.paused:
            away.add(request.id)
            swapped += request.computed
        if away:
            for scheduled in plan.scheduled:
                if scheduled.request.id in away:
                    away.discard(scheduled.request.id)
                    swapped += scheduled.start
        return swapped

    def _answer(self, plan: Plan, now: float, service: float) -> int:
        """Tell the scheduler what the step gave; -> how many requests it ended."""
        results: list[RequestResult] = []
        ended: list[Request] = []
        left = self._left
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.start + scheduled.count < len(request.tokens):
                results.append(self._outcome(0, 0, 0, False))
                continue
            i = int(request.id)
            drafted, accepted = self._round(scheduled)
            if drafted:
                self._drafted[i] += drafted
                self._accepted[i] += accepted
                self._rounds[i] += 1
            new = min(accepted + 1, left[i])
            left[i] -= new
            if isnan(self._first_token[i]):
                self._first_token[i] = now
            if not left[i]:
                ended.append(request)
                self._finished[i] = now
            results.append(self._outcome(new, drafted, accepted, not left[i]))
        self.scheduler.update(plan, results, now, seconds=service)
        for request in ended:
            i = int(request.id)
            assert request.first_scheduled is not None
            self._first_scheduled[i], self._preemptions[i] = request.first_scheduled, request.preemptions
            self._forget(request)
        return len(ended)

    def _round(self, scheduled: ScheduledRequest) -> tuple[int, int]:
        """Draft tokens of this work that were verified, and accepted."""
        if not scheduled.levels:
            return 0, 0
        assert self._acceptance is not None
        return self._acceptance.round(int(scheduled.request.id), scheduled.request.output_len, scheduled.levels)

    def _forget(self, request: Request) -> None:
        """It has ended."""
        if self._acceptance is not None:
            self._acceptance.forget(int(request.id))

    def _outcome(self, tokens: int, drafted: int, accepted: int, ended: bool) -> RequestResult:
        """Outcomes are constant and few: each is made once. Tokens are all 0, nobody reads them."""
        key = (tokens, drafted, accepted, ended)
        if (known := self._outcomes.get(key)) is None:
            reason = "length" if ended else None
            known = self._outcomes[key] = RequestResult((0,) * tokens, reason, proposed=drafted, accepted=accepted)
        return known
