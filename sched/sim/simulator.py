"""Discrete-event simulation of serving: the engine's scheduler on a virtual clock, with a cost model as the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from jaxspec.sched.plan import Lookahead, Plan, RequestResult, ScheduledRequest
from jaxspec.sched.reprediction import Repredictor
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cost import Cost, StepLoad
from jaxspec.sched.sim.ledger import Ledger
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
    #: Seconds in which a step ran, over all replicas.
    busy: float
    #: Plans after which requests still waited.
    queued: int = 0
    #: Over all requests: swaps to the host, pages moved in both directions, seconds that steps waited for transfers.
    swaps: int = 0
    moved: int = 0
    stalled: float = 0.0
    #: Tokens recomputed after preemptions.
    recomputed: int = 0
    #: Prompt tokens of each request found in the prefix cache when it was first admitted.
    cached: np.ndarray | None = None

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

    `run` serves all of it. A `Cluster` has one for each replica, which share a `ledger`, and drives them step by step:
    `add`, `begin`, `finish`.

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
        ledger: Ledger | None = None,
    ) -> None:
        if draft_length and acceptance is None:
            raise ValueError("draft_length needs an acceptance model")
        self.scheduler, self.workload, self.cost = scheduler, workload, cost
        self._acceptance, self._draft_length = acceptance, draft_length
        room = min(scheduler.config.max_model_len, scheduler.pool.num_pages * scheduler.pool.page_size)
        self.ledger = Ledger(workload, room, slo) if ledger is None else ledger
        #: Steps, pauses of all requests, plans after which requests still waited, seconds in which a step ran, and in
        #: which one waited for transfers.
        self.steps = self.pauses = self.queued = 0
        self.busy = self.stalled = 0.0
        costs = scheduler.config.costs
        self.link = Link(costs) if scheduler.config.host_pages and costs is not None else None
        self._repredictor: Repredictor | None = None
        if probe is not None:
            every, left = probe
            self._repredictor = Repredictor(scheduler, every, lambda requests: [left(r) for r in requests])
        self._paused: set[str] = set()
        self._results: dict[tuple[int, int, int, str | None], RequestResult] = {}
        self._under_way: tuple[Plan, float, float] | None = None
        #: Requests that got their first token in the last step, and requests that finished in it.
        self.answered: list[int] = []
        self.ended: list[int] = []

    def run(self, advance: Callable[[], None] = lambda: None) -> Served:
        """Run until all requests are done; calls `advance` once per percent of requests done.

        Raises `Stuck`, and whatever `Scheduler.add` raises for a request that can never be served.
        """
        arrival = self.ledger.arrival
        n, now, coming, done = len(arrival), 0.0, 0, 0
        while coming < n or self.scheduler.has_work:
            while coming < n and arrival[coming] <= now:
                self.add(self.ledger.request(coming), now)
                coming += 1
            end = self.begin(now)
            if end is None:
                now = self._next_event(now, arrival[coming] if coming < n else None)
                continue
            now = end
            self.finish()
            for _ in range(100 * done // n, 100 * (done + len(self.ended)) // n):
                advance()
            done += len(self.ended)
        return served(self.ledger, [self])

    def add(self, request: Request, now: float) -> None:
        """A request of the ledger has arrived. Not while a step runs: the scheduler gets it before the next one.

        Raises whatever `Scheduler.add` raises for a request that can never be served.
        """
        if self._acceptance is not None:
            request.true_acceptance = self._acceptance.share(int(request.id), self._draft_length)
        self.scheduler.add(request, now)

    def begin(self, now: float) -> float | None:
        """Start the next step, and return when it ends; `finish` comes then. None: there is nothing to run."""
        scheduler = self.scheduler
        if self._repredictor is not None:
            self._repredictor.predict(self._repredictor.due(), now)
        while True:
            plan = scheduler.plan(now, self._lookahead(now))
            self.queued += scheduler.num_waiting > 0
            if self.link is not None:
                self.link.start(plan, now)
            if plan.scheduled:
                break
            if not (plan.preempted or plan.paused or plan.upload):
                return None
            # This plan only freed or moved pages, the next one schedules requests.
        self.pauses += len(plan.paused)
        seconds, service = self._time(plan, now)
        if self.link is not None:
            begin = self.link.ready(plan, now)
            self.stalled += begin - now
            now = begin
        self.steps += 1
        self.busy += seconds
        self._under_way = plan, now + seconds, service
        return now + seconds

    def finish(self) -> None:
        """The step has ended: pass its results to the scheduler. Afterwards `answered` and `ended` are its requests."""
        assert self._under_way is not None
        plan, now, service = self._under_way
        self._under_way, self.answered, self.ended = None, [], []
        self._update(plan, now, service)

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

    def _update(self, plan: Plan, now: float, service: float) -> None:
        """Pass the step's results to the scheduler, and note them in the ledger."""
        results: list[RequestResult] = []
        finished: list[Request] = []
        ledger = self.ledger
        left, first_token = ledger.left, ledger.first_token
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.start + scheduled.count < len(request.tokens):
                results.append(self._result(0, 0, 0, None))
                continue
            i = int(request.id)
            drafted, accepted = self._round(scheduled)
            if drafted:
                ledger.drafted[i] += drafted
                ledger.accepted[i] += accepted
                ledger.rounds[i] += 1
            new = min(accepted + 1, left[i])
            left[i] -= new
            if isnan(first_token[i]):
                first_token[i] = now
                self.answered.append(i)
            if not left[i]:
                finished.append(request)
                ledger.finished[i] = now
            reason = None
            if not left[i]:
                reason = "stop" if request.output_len + new < request.max_tokens else "length"
            results.append(self._result(new, drafted, accepted, reason))
        self.scheduler.update(plan, results, now, seconds=service)
        for request in finished:
            i = int(request.id)
            assert request.first_scheduled is not None
            ledger.first_scheduled[i], ledger.preemptions[i] = request.first_scheduled, request.preemptions
            ledger.cached[i] = request.cached_tokens
            self.ended.append(i)
            self._ended(request)

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


def served(ledger: Ledger, simulations: Sequence[Simulation]) -> Served:
    """The results of simulations that have served the ledger's requests together."""
    return Served(
        ledger.workload,
        first_scheduled=np.array(ledger.first_scheduled, float),
        first_token=np.array(ledger.first_token, float),
        finished=np.array(ledger.finished, float),
        preemptions=np.array(ledger.preemptions, int),
        drafted=np.array(ledger.drafted, int),
        accepted=np.array(ledger.accepted, int),
        rounds=np.array(ledger.rounds, int),
        steps=sum(s.steps for s in simulations),
        pauses=sum(s.pauses for s in simulations),
        busy=sum(s.busy for s in simulations),
        queued=sum(s.queued for s in simulations),
        swaps=sum(s.scheduler.num_swaps for s in simulations),
        moved=sum(s.link.moved for s in simulations if s.link is not None),
        stalled=sum(s.stalled for s in simulations),
        recomputed=sum(s.scheduler.recomputed_tokens for s in simulations),
        cached=np.array(ledger.cached, int),
    )
