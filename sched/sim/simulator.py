"""Discrete-event simulation of serving: the engine's scheduler on a virtual clock, with a cost model as the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np

from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.reprediction import Repredictor
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cost import Cost, StepLoad
from jaxspec.sched.sim.link import Link
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import NONE, Slo


class Stuck(RuntimeError):
    """The scheduler holds requests but plans no step and waits for no event: a bug in a policy."""


@dataclass(frozen=True, slots=True)
class Served:
    """Results of a simulation: `[requests]` arrays in the workload's order, times in seconds from the start."""

    workload: Workload
    first_scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    #: Preemptions of each request, swapped or recomputed.
    preemptions: np.ndarray
    #: Draft tokens verified and accepted, and the number of verifications.
    drafted: np.ndarray
    accepted: np.ndarray
    rounds: np.ndarray
    steps: int
    #: Pauses of all requests together.
    pauses: int
    #: Seconds in which a step ran.
    busy: float
    #: Over all requests: swaps to the host, pages moved in both directions, seconds that steps waited for transfers.
    swaps: int = 0
    moved: int = 0
    stalled: float = 0.0
    #: Tokens recomputed after preemptions.
    recomputed: int = 0

    @property
    def jct(self) -> np.ndarray:
        """Job completion time (E2E latency) in seconds."""
        return self.finished - self.workload.arrival

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds per output token after the first; NaN for requests with one output token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.finished - self.first_token) / (self.workload.output - 1)
        return np.where(self.workload.output > 1, mean, np.nan)

    @property
    def met(self) -> np.ndarray:
        """Whether each request met its TPOT SLO; true without an SLO and for requests with one output token."""
        slo = self.workload.tpot
        return ~(self.tpot > slo) if slo is not None else np.ones(len(self.workload), bool)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last completion."""
        return float(self.finished.max() - self.workload.arrival[0]) if len(self.workload) else 0.0

    def ending(self, finished: np.ndarray) -> Served:
        """A copy with other completion times `[requests]`."""
        return replace(self, finished=finished)

    def throughput_at(self, share: float) -> float:
        """Requests per second from time 0 until this share of them was done.

        SSJF's published experiments measure throughput this way, with a share of 0.25.
        """
        ends = np.sort(self.finished)
        done = int(share * (len(ends) - 1))
        return done / float(ends[done])


class Simulation:
    """Serves `workload` with `scheduler`, which must be empty. Raises `ValueError` if drafts have no acceptance model.

    In every step each decoding request drafts a chain of `draft_length` tokens, of which `acceptance` determines the
    accepted ones; 0 disables drafting. `slo` applies to all requests if the workload has no SLOs of its own.

    `probe`, a number and a function, stands for the engine's length probe: after each such number of a request's output
    tokens, a `Repredictor` asks the function how many it is expected still to generate.

    A request ends at its output length, which only oracles know (`Request.true_len`). Its `max_tokens` is the
    workload's; without one, `MAX_TOKENS` or what the context and the KV pool leave, but at least its output length.

    As on the engine, step times in the scheduler's config are updated by each step, preempted requests recompute their
    tokens, and swaps overlap with steps and take the time given by the scheduler's swap costs. The KV positions of
    paused and resumed requests are passed to the cost model as `StepLoad.swapped`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        cost: Cost,
        acceptance: Acceptance | None = None,
        draft_length: int = 0,
        slo: Slo = NONE,
        probe: tuple[int, Callable[[Request], float]] | None = None,
    ) -> None:
        if draft_length and acceptance is None:
            raise ValueError("draft_length needs an acceptance model")
        self.scheduler, self.workload, self.cost = scheduler, workload, cost
        self._acceptance, self._draft_length = acceptance, draft_length
        n = len(workload)
        # Lists, because indexing an array element by element would box each number.
        self._left: list[int] = workload.output.tolist()
        self._slos, self._slo = workload.slos, slo
        self._max_tokens = self._caps()
        self._first_scheduled, self._first_token, self._finished = ([nan] * n for _ in range(3))
        self._preemptions, self._drafted, self._accepted, self._rounds = ([0] * n for _ in range(4))
        self._steps = self._pauses = 0
        self._busy = self._stalled = 0.0
        costs = scheduler.config.costs
        self._link = Link(costs) if scheduler.config.host_pages and costs is not None else None
        self._repredictor: Repredictor | None = None
        if probe is not None:
            every, left = probe
            self._repredictor = Repredictor(scheduler, every, lambda requests: [left(r) for r in requests])
        self._paused: set[str] = set()
        self._results: dict[tuple[int, int, int, str | None], RequestResult] = {}

    def run(self, advance: Callable[[], None] = lambda: None) -> Served:
        """Run until all requests are done; calls `advance` once per percent of requests done.

        Raises `Stuck`, and whatever `Scheduler.add` raises for a request that can never be served.
        """
        workload, scheduler = self.workload, self.scheduler
        arrival, input_len = workload.arrival.tolist(), workload.input.tolist()
        predicted = workload.predicted.tolist()
        n, now, coming, done = len(workload), 0.0, 0, 0
        while coming < n or scheduler.has_work:
            while coming < n and arrival[coming] <= now:
                scheduler.add(self._request(coming, input_len[coming], arrival[coming], predicted[coming]), now)
                coming += 1
            if self._repredictor is not None:
                self._repredictor.predict(self._repredictor.due(), now)
            plan = scheduler.plan(now, self._lookahead(now))
            if self._link is not None:
                self._link.start(plan, now)
            if not plan.scheduled:
                if plan.preempted or plan.paused or plan.upload:
                    continue  # this plan only freed or moved pages, the next one schedules requests
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
            finished = self._update(plan, now, service)
            for _ in range(100 * done // n, 100 * (done + finished) // n):
                advance()
            done += finished
        return Served(
            workload,
            first_scheduled=np.array(self._first_scheduled, float),
            first_token=np.array(self._first_token, float),
            finished=np.array(self._finished, float),
            preemptions=np.array(self._preemptions, int),
            drafted=np.array(self._drafted, int),
            accepted=np.array(self._accepted, int),
            rounds=np.array(self._rounds, int),
            steps=self._steps,
            pauses=self._pauses,
            busy=self._busy,
            swaps=scheduler.num_swaps,
            moved=self._link.moved if self._link else 0,
            stalled=self._stalled,
            recomputed=scheduler.recomputed_tokens,
        )

    def _request(self, i: int, input_len: int, arrival: float, predicted: float) -> Request:
        request = Request(str(i), input_len, [0] * input_len, self._max_tokens[i], arrival)
        request.true_len = self._left[i]
        if self._acceptance is not None:
            request.true_acceptance = self._acceptance.share(i, self._draft_length)
        request.slo = self._slo if self._slos is None else self._slos[i]
        if not isnan(predicted):  # otherwise the scheduler's length oracle predicts
            request.predicted_len = predicted
        return request

    def _caps(self) -> list[int]:
        """`max_tokens` of each request."""
        workload, pool = self.workload, self.scheduler.pool
        if workload.max_tokens is not None:
            return workload.max_tokens.tolist()
        room = min(self.scheduler.config.max_model_len, pool.num_pages * pool.page_size) - workload.input
        return np.maximum(workload.output, np.minimum(workload.caps, room)).tolist()

    def _next_event(self, now: float, arrival: float | None) -> float:
        """Time of the next arrival or of the scheduler's next wake-up. Raises `Stuck` if there is neither."""
        wake = self.scheduler.wake(now)
        times = [t for t in (arrival, wake) if t is not None and t > now]
        if not times:
            raise Stuck(f"{self.scheduler.num_waiting} requests wait at {now:.6f} s, but no event is left to wake them")
        return min(times)

    def _lookahead(self, now: float) -> Lookahead:
        return Lookahead(self._draft_length, self._draft_length)

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        """Returns the step's seconds, and how many of them count as service (here all)."""
        load = self._plan_load(plan)
        seconds = self.cost.seconds(load)
        if (times := self.scheduler.config.times) is not None:
            plain = replace(load, drafting=0, levels=0, swapped=0) if load.levels or load.swapped else load
            times.observe(load.tokens, self.cost.seconds(plain), load.context)
        return seconds, seconds

    def _plan_load(self, plan: Plan) -> StepLoad:
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
        """KV positions of the requests that this plan pauses, and of the paused ones that it resumes."""
        paused, swapped = self._paused, 0
        for request in plan.paused:
            paused.add(request.id)
            swapped += request.computed
        if paused:
            for scheduled in plan.scheduled:
                if scheduled.request.id in paused:
                    paused.discard(scheduled.request.id)
                    swapped += scheduled.start
        return swapped

    def _update(self, plan: Plan, now: float, service: float) -> int:
        """Pass the step's results to the scheduler. Returns the number of requests that finished."""
        results: list[RequestResult] = []
        finished: list[Request] = []
        left = self._left
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.start + scheduled.count < len(request.tokens):
                results.append(self._result(0, 0, 0, None))
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
                finished.append(request)
                self._finished[i] = now
            reason = None
            if not left[i]:
                reason = "stop" if request.output_len + new < request.max_tokens else "length"
            results.append(self._result(new, drafted, accepted, reason))
        self.scheduler.update(plan, results, now, seconds=service)
        for request in finished:
            i = int(request.id)
            assert request.first_scheduled is not None
            self._first_scheduled[i], self._preemptions[i] = request.first_scheduled, request.preemptions
            self._ended(request)
        return len(finished)

    def _round(self, scheduled: ScheduledRequest) -> tuple[int, int]:
        """Draft tokens of this scheduled request: (verified, accepted)."""
        if not scheduled.levels:
            return 0, 0
        assert self._acceptance is not None
        return self._acceptance.round(int(scheduled.request.id), scheduled.request.output_len, scheduled.levels)

    def _ended(self, request: Request) -> None:
        """Drop the state of a finished request."""
        if self._acceptance is not None:
            self._acceptance.forget(int(request.id))

    def _result(self, tokens: int, drafted: int, accepted: int, reason: str | None) -> RequestResult:
        """A cached result: they are immutable and few distinct ones occur. Token ids do not matter and are all 0."""
        key = (tokens, drafted, accepted, reason)
        if (cached := self._results.get(key)) is None:
            cached = self._results[key] = RequestResult((0,) * tokens, reason, proposed=drafted, accepted=accepted)
        return cached
