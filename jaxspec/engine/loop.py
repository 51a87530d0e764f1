"""One engine step: schedule, draft, execute, stream the previous step's tokens, process the results."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.launcher import Launcher
from jaxspec.engine.live_view import LiveView
from jaxspec.engine.metrics import Counters, StepTimer
from jaxspec.engine.micro_batch import MicroBatch
from jaxspec.engine.recovery import Recovery
from jaxspec.engine.request_state import RequestState
from jaxspec.engine.startup import Parts
from jaxspec.engine.step_under_way import StepUnderWay
from jaxspec.outputs import RequestMetrics
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.spec.host_times import StepTook
from jaxspec.sched.spec.micro_batches import turns_pay
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.candidates import Draft

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs the steps of one engine. Only the engine's thread uses it.

    `states` maps request ids to the requests that have not finished. `closed` is called with a finished request
    just before its last output is delivered, `cancel` with the id of a request whose `on_output` raised.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        clock: Callable[[], float],
        states: Mapping[str, RequestState],
        closed: Callable[[RequestState], None],
        cancel: Callable[[str], None],
    ):
        self._clock, self._states, self._closed, self._cancel = clock, states, closed, cancel
        self.warm_up, self.model_runner, self.scheduler = parts.warm_up, parts.model_runner, parts.scheduler
        self.predictions, self.host = parts.predictions, parts.host
        #: Predicts lengths again while answers are generated; None: once only.
        self.repredictor = parts.repredictor
        #: Seconds that it took between steps. That a step does not overlap with the one before is not counted.
        self.repredicting_seconds = 0.0
        #: Drafts for requests and starts their steps.
        self.launcher = Launcher(config, parts, states)
        self.penalties = parts.model_runner.penalties
        self.counters = Counters()
        #: When to plan again if nothing arrives before, in the clock's seconds; None: at once.
        self.wake_at: float | None = None
        #: Called with a request's metrics and finish reason when it ends.
        self.observers: list[Callable[[RequestMetrics, str], None]] = []
        #: Called with the seconds per token since a request's previous tokens, and the number of new tokens.
        self.token_observers: list[Callable[[float, int], None]] = []
        #: Called with a request's metrics when its first token arrives.
        self.first_token_observers: list[Callable[[RequestMetrics], None]] = []
        #: Called after a step with the number of prompt tokens that it computed and output tokens that it gave.
        self.step_observers: list[Callable[[int], None]] = []
        #: Tokens that end an answer, unless a request ignores them.
        self.eos = frozenset(parts.model.tokenizer.eos_token_ids)
        self._int8_kv = config.kv_cache_dtype == "int8"
        self._ready: list[RequestState] = []  # requests with output to deliver
        self._under_way: deque[StepUnderWay] = deque()  # the oldest first
        self._finished_at = self._clock()
        self._in_turns = False
        self.token_text = parts.model.tokenizer.token_text
        #: Snapshots for those who watch.
        self.live = LiveView(self, config)
        #: Requests that may be why what is being done fails.
        self.suspects: Sequence[Request] = ()
        #: Restarts the loop after a failed step.
        self.recovery = Recovery(self, clock)

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits, or a step is under way."""
        return self.scheduler.has_work or bool(self._under_way or self.recovery.held_back)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, also until others have been tried alone after a failure."""
        return self.scheduler.num_waiting + len(self.recovery.held_back)

    @property
    def unfinished(self) -> list[RequestState]:
        """Requests that the scheduler has been given and that have not ended."""
        states = list(self._states.values())  # other threads may submit meanwhile
        return [state for state in states if state.scheduled and state.finish_reason is None]

    @property
    def speculator(self) -> Speculator:
        """Decides on drafts."""
        return self.launcher.speculator

    @property
    def has_output(self) -> bool:
        """Whether `deliver` has something to deliver."""
        return bool(self._ready)

    def add(self, state: RequestState, now: float) -> None:
        """Queue a new request. It ends with an error if that fails."""
        if self.recovery.keep_back(state):
            return
        request = state.request
        try:
            self.scheduler.add(request, now)
            state.scheduled = True
            # With an SLO its length also decides whether others are throttled for it.
            prompt = request.tokens[: request.prompt_len]
            self.predictions.add(request.id, prompt, at_once=state.predict or bool(request.slo))
        except Exception as error:
            log.exception("request %s could not be queued", request.id)
            self.scheduler.cancel(request.id, now)
            self.end(state, "error", f"the request could not be queued: {error}")

    def abort(self, state: RequestState, now: float) -> None:
        """End a request that has not finished, with reason "abort"."""
        self.scheduler.cancel(state.request.id, now)
        self.end(state, "abort", None)

    def abort_all(self, states: Sequence[RequestState], reason: str, error: str | None) -> None:
        """End these requests and deliver their last output. After a failure (`reason` "error") the scheduler is not
        touched: its state is unknown, and nothing will run."""
        for state in states:
            if state.finish_reason is None:
                self.end(state, reason, error)
                if reason != "error":
                    self.scheduler.cancel(state.request.id, self._clock())
        self._ready = list(states)
        self.deliver()

    def end(self, state: RequestState, reason: str, error: str | None) -> None:
        """End a request; the caller takes it from the scheduler. `deliver` tells its client."""
        state.finish_reason, state.error = reason, error
        self.penalties.release(state.request)
        self._ready.append(state)

    def step(self) -> None:
        """Launch the next step, and finish those under way that it did not overlap with.

        Text of earlier steps is decoded and delivered while the device computes.
        """
        self.suspects = ()
        self.recovery.proceed()
        self.warm_up.adopt_ready(busy=True, settle=self.finish_steps)
        launched = self._launch_next()
        self.suspects = ()
        if self.live.watched:  # what still waits after the plan does so for a reason
            self.live.planned(launched and launched.plan, self._clock())
        self.deliver()
        keep = 0 if launched is None else int(self._in_turns or (self.launcher.overlaps and launched.predictable))
        while len(self._under_way) > keep:
            self._finish(self._under_way.popleft())
        if self._under_way:  # the device has work meanwhile
            self.deliver()

    def _launch_next(self) -> StepUnderWay | None:
        """Plan a step and start it. None: there is nothing to run before something happens."""
        due = self.repredictor.due() if self.repredictor is not None else []
        if self._under_way and (due or not (self._in_turns or self._under_way[-1].predictable)):
            self.finish_steps()  # also with `due`: the device would still write what the probe reads
        timer = StepTimer(self._clock)
        before = self._under_way[-1] if self._under_way else None
        if before is not None:
            self.scheduler.advance(before.plan, hold=self._in_turns, drafted=before.depths)
        if not self.recovery.trying:  # requests that are kept back would not get theirs
            self.predictions.apply(self.scheduler.predicted, timer.begun)
        if self.repredictor is not None and due:
            begun = timer.now()
            with timer.outside_step():
                self.repredictor.predict(due, timer.begun)
            self.repredicting_seconds += timer.now() - begun
        lookahead = self.speculator.lookahead(self.scheduler.ready, timer.begun)
        if before is not None and not self._in_turns and lookahead.levels and not self.launcher.drafts_ahead:
            # Drafts start from the last token, so its step has to end first. The decision stays: some of it is a turn
            # of many steps, such as a probe.
            self.finish_steps()
            before, timer = None, StepTimer(self._clock)
        if self._in_turns:
            decoding = sum(request.decoding for request in self.scheduler.running)
            lookahead = replace(lookahead, max_decoding=-(-decoding // 2))
        self.suspects = self.scheduler.up_next
        plan = self.scheduler.plan(timer.begun, lookahead)
        if self.scheduler.order_matters(plan):
            self.predictions.predict_held()
        for request in (*plan.preempted, *plan.paused):
            self.penalties.release(request)
        self.suspects = ()  # of failed transfers
        with timer.outside_step():
            self.host.carry_out(plan)
        self.suspects = [s.request for s in plan.scheduled]
        self.wake_at = None
        if not plan.scheduled:
            if not self._under_way:
                self.wake_at = self.scheduler.wake(timer.begun)
            return None
        step = StepUnderWay(plan, timer, overlaps=before is not None)
        if before is not None:
            before.overlaps = True
        follows = None if self._in_turns or before is None else before.batches[0]
        self.launcher.launch(step, follows, self._in_turns)
        timer.mark_launched(len(step.batches))
        self._under_way.append(step)
        return step

    def finish_steps(self) -> None:
        """Finish all steps under way."""
        while self._under_way:
            self._finish(self._under_way.popleft())

    def drop_steps(self) -> None:
        """Wait for the steps under way, whose results and errors do not matter any more; the next step is a first one.
        Count and deliver tokens that requests have got and the scheduler does not know."""
        for step in self._under_way:
            for batch in step.batches:
                with suppress(Exception):
                    batch.pending.wait()
        self._under_way.clear()
        self.speculator.drafted.clear()
        self._in_turns, self.wake_at, self._finished_at = False, None, (now := self._clock())
        for state in (states := list(self._states.values())):
            request = state.request
            missed = len(state.output) - (request.num_known - request.prompt_len)
            if missed > 0:
                request.first_token = now if request.first_token is None else request.first_token
                self._count_tokens(state, missed, now)
        self._ready = states

    def _finish(self, step: StepUnderWay) -> None:
        """Wait for a step, and process its results."""
        plan, timer = step.plan, step.timer
        self.suspects = [s.request for s in plan.scheduled]
        timer.follows(self._finished_at)
        tokens = self.counters.prompt_tokens + self.counters.generation_tokens
        by_id: dict[str, RequestResult] = {}
        seconds = ahead = 0.0  # `ahead`: estimated time of the draft round between the step before and this one
        for batch in step.batches:
            packed = batch.pending.packed
            self.counters.count(batch.scheduled, packed, self.model_runner.positions_read(packed))
            if batch.ahead is not None:  # first: if the round failed, so did the step, but the drafter is to blame
                self._read_ahead(batch)
                ahead += batch.ahead.seconds
            decision = batch.pending.wait()
            seconds = timer.mark_read()
            if batch is step.batches[-1] and seconds > ahead:
                self.model_runner.times.observe(packed.shape.tokens, seconds - ahead, int(packed.committed.sum()))
            if self.live.watched:
                self.live.verified(batch, decision, timer.read)
            by_id |= self._process(batch, decision)
        results = [by_id[s.request.id] for s in plan.scheduled]
        self.scheduler.update(plan, results, timer.read, timer.read - timer.begun)
        for s, result in zip(plan.scheduled, results, strict=True):
            if result.tokens:
                self._count_tokens(self._states[s.request.id], len(result.tokens), timer.read)
        self._choose_turns(step)
        self.counters.add_times(timer, results, overlapped=bool(self._under_way), ahead=ahead)
        if len(step.batches) == 1 and not self._in_turns and step.terms is not None:
            new = sum(len(result.tokens) for result in results)
            took = StepTook(timer.now() - timer.begun, seconds, step.drafted, step.overlaps)
            self.speculator.step_took(plan, step.terms, new, took)
        self._finished_at, self.suspects = timer.read, ()
        _tell(self.step_observers, self.counters.prompt_tokens + self.counters.generation_tokens - tokens)

    def _read_ahead(self, batch: MicroBatch) -> None:
        """Read a micro-batch's drafts. If that fails, wait for the step: `drop_steps` no longer knows it."""
        assert batch.ahead is not None
        try:
            self.speculator.read_ahead(batch.ahead)
        except Exception:
            with suppress(Exception):
                batch.pending.wait()
            raise

    def under_way_ids(self) -> frozenset[str]:
        """Ids of the requests in steps under way."""
        return frozenset(s.request.id for step in self._under_way for s in step.plan.scheduled)

    def _choose_turns(self, step: StepUnderWay) -> None:
        """Decide whether two groups of requests take turns from the next step on."""
        if not self.launcher.may_take_turns:
            self._in_turns = False
        elif self._in_turns or not self._under_way:
            both = [s for under_way in (step, *self._under_way) for s in under_way.plan.scheduled]
            self._in_turns = self.launcher.draft_turns or turns_pay(both, self.speculator)

    def _process(self, batch: MicroBatch, decision: np.ndarray) -> dict[str, RequestResult]:
        """The results of a micro-batch by request id. `decision [C + T]` int32 is what the device decided."""
        results: dict[str, RequestResult] = {}
        logprobs = batch.pending.logprobs  # read before any request changes: that may fail
        for verified in batch.requests(decision):
            state, draft, path = verified.state, verified.draft, verified.path
            if state.finish_reason is not None:  # it was ended while the step was under way
                results[state.request.id] = RequestResult()
                self.speculator.drafted.pop(state.request.id, None)
                continue
            if verified.scheduled.samples:
                self.speculator.observe(state.request, [n - 1 for n in path[1:]] if path else ())
            try:
                result = state.append(verified.scheduled, verified.tokens, logprobs, verified.row, path)
            except Exception as error:
                log.exception("a result of request %s failed; the request is ended", state.request.id)
                self.end(state, "error", f"its result could not be processed: {error}")
                result = RequestResult((), "error")
            if draft is not None and path is not None:
                result = RequestResult(result.tokens, result.finish_reason, len(draft), len(path) - 1)
                self._count_drafts(state, draft, len(path) - 1)
            if result.finish_reason is not None:
                self.penalties.release(state.request)  # before it is delivered: the next plan may run another request
            results[state.request.id] = result
        return results

    def _count_drafts(self, state: RequestState, draft: Draft, accepted: int) -> None:
        for counts in (self.counters.speculation, state.metrics.speculation):
            counts.add(len(draft), accepted)

    def _count_tokens(self, state: RequestState, count: int, now: float) -> None:
        """A step, which ended at `now`, gave the request `count` new tokens."""
        self.counters.generation_tokens += count
        state.failures = 0
        self._ready.append(state)
        last, state.last_token = state.last_token, now
        if last is None:
            state.update_metrics()
            _tell(self.first_token_observers, state.metrics)
        else:
            _tell(self.token_observers, (now - last) / count, count)

    def deliver(self) -> None:
        """Decode and deliver new tokens, and close finished requests."""
        ready, self._ready = self._ready, []
        for state in ready:
            try:
                delta = state.delta()
            except Exception as error:
                log.exception("the output of request %s failed; the request is ended", state.request.id)
                if state.finish_reason is None:  # else the scheduler does not have it any more
                    self.scheduler.cancel(state.request.id, self._clock())
                    self.penalties.release(state.request)
                delta = state.broken(f"its output could not be decoded: {error}")
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._close(state)
            try:
                state.on_output(delta)
            except Exception:
                # An error in the callback must not stop other requests: cancel this one and continue.
                log.exception("on_output of request %s failed; the request is cancelled", state.request.id)
                self._cancel(state.request.id)

    def _close(self, state: RequestState) -> None:
        state.metrics.finished = self._clock()
        state.metrics.kv_quantized = self._int8_kv or (self.host.quantized and state.request.swaps > 0)
        if self.live.watched:
            self.live.ended(state.request.id, state.metrics, state.finish_reason or "abort")
        self._closed(state)
        reason = state.natural_finish_reason(self.eos)
        _tell([self.speculator.ended], state.request)
        _tell([self.predictions.ended], state.request.id, state.metrics.output_tokens, reason)
        _tell(self.observers, state.metrics, state.finish_reason or "abort")


def _tell(observers: Sequence[Callable[..., None]], *event: Any) -> None:
    """Call all observers; one that fails is logged, because requests do not depend on it."""
    for observe in observers:
        try:
            observe(*event)
        except Exception:
            log.exception("an observer failed")
