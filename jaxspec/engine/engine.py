"""The engine: a thread that asks the scheduler for a plan, runs it on the device and hands out what came of it.

While the device runs a step, the host turns the tokens of the step before into text and streams them; what is left
between two steps is taking in the result, planning and packing.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import uuid4

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.draft.registry import runners
from jaxspec.engine.metrics import Counters, EngineStats, snapshot
from jaxspec.engine.micro_batch import MicroBatch
from jaxspec.engine.penalty_rows import PenaltyRows
from jaxspec.engine.request_state import RequestState
from jaxspec.engine.startup import start_up
from jaxspec.errors import EngineDead, EngineDraining
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.predict.predictor import LengthPredictor
from jaxspec.sampling_params import InvalidRequest, SamplingParams, check_request
from jaxspec.sched.admission import SloAdmission, least
from jaxspec.sched.plan import RequestResult, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import NO_DRAFTS, QueueFull
from jaxspec.sched.slo import NONE, Slo
from jaxspec.sched.spec.micro_batches import split
from jaxspec.sched.spec.speculator import DEPTH
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.sched.timing import StepTimes
from jaxspec.slo import check_possible
from jaxspec.step.packing import SamplingInputs
from jaxspec.step.profiles import Profile
from jaxspec.step.warmup import Progress, silent

log = logging.getLogger(__name__)

#: Longest sleep of an idle loop, in seconds; a submission wakes it at once.
IDLE = 1.0


class Engine:
    """Serves one model. `submit` and `cancel` may be called from any thread; `on_output` is called from the engine's.

    `clock` gives seconds; it only has to be monotonic. `model` may be passed already loaded, and the `proxy` that
    predicts lengths too (tests do). `renew_profiles`: measure what programs take, also where earlier times are stored.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        proxy: LengthPredictor | None = None,
        progress: Progress = silent,
        clock: Callable[[], float] = time.monotonic,
        renew_profiles: bool = False,
    ):
        self.config, self._clock = config, clock
        parts = start_up(config, model, proxy, progress, clock, renew_profiles)
        self.tokenizer, self.model_config = parts.model.tokenizer, parts.model.config
        self.model_name = config.served_model_name or parts.model.name
        self.max_model_len = parts.max_model_len
        #: What is compiled, and what is still being compiled in the background.
        self.warm_up = parts.warm_up
        #: Decides on drafts; between requests another may take its place (benchmarks do that).
        self.speculator = parts.speculator
        self._model_runner, self._times, self._host = parts.model_runner, parts.model_runner.times, parts.host
        self._pool, self._scheduler, self._predictions = parts.pool, parts.scheduler, parts.predictions
        self._admission = SloAdmission(
            self._times,
            strict=config.slo.admission == "strict",
            paced=config.pace != "none",
            max_num_seqs=config.max_num_seqs,
        )
        self._eos = frozenset(self.tokenizer.eos_token_ids)
        self._random = np.random.default_rng(config.seed)
        self._states: dict[str, RequestState] = {}
        self._penalty_rows = PenaltyRows(config.max_num_seqs)
        self._ready: list[RequestState] = []  # sessions with something to hand out
        self._counters = Counters()
        self._wake_at: float | None = None  # when there is a plan again, if nothing happens before
        self.observers: list[Callable[[RequestMetrics, str], None]] = []
        self.token_observers: list[Callable[[float, int], None]] = []
        self.first_token_observers: list[Callable[[RequestMetrics], None]] = []
        self._last_token: dict[str, float] = {}

        self._lock = threading.Condition()
        self._inbox: deque[tuple[RequestState, bool]] = deque()  # (session, False: it is new; True: cancel it)
        self._queued = 0  # sessions in the inbox
        self._health = "ok"
        self._stop_at: float | None = None  # when a drain gives up
        self.failure: str | None = None
        self._thread: threading.Thread | None = None

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """ok, draining or dead."""
        return self._health

    @property
    def step_times(self) -> StepTimes:
        """What steps take, as profiled and corrected since."""
        return self._times

    @property
    def profiled(self) -> list[Profile]:
        """What programs take, as measured: of steps, and of the drafters' rounds."""
        return [self._model_runner.profile, *(runner.profile for runner in runners(self.speculator))]

    def start(self) -> None:
        if self._predictions:
            self._predictions.start()
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        self._thread.start()
        self.warm_up.start(busy=lambda: bool(self._scheduler.has_work or self._inbox), wake=self._notify)

    def _notify(self) -> None:
        with self._lock:
            self._lock.notify()

    def shutdown(self, drain: bool = False, timeout: float = 30.0) -> None:
        """Stop the loop. With `drain`, what runs or waits has `timeout` seconds to end; the rest is aborted."""
        with self._lock:
            if self._health == "ok":
                self._health = "draining"
            self._stop_at = self._clock() + (timeout if drain else 0.0)
            self._lock.notify()
        self.warm_up.stop()
        if self._thread is None:
            self._end_all("abort", None)
            self._health, self.failure = "dead", "the engine has been shut down"
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout + 10 * IDLE)
            if self._thread.is_alive():
                log.error("the engine's thread did not stop within %.0f s", timeout + 10 * IDLE)
            self.warm_up.close()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_output: Callable[[OutputDelta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        expected_tokens: int | None = None,
        slo: Slo | None = None,
    ) -> str:
        """Queue a request; its deltas go to `on_output`, the last one with a finish reason. -> its id.

        `params.n` is the caller's: submit n requests. `priority`: smaller goes first, where the order heeds it.
        `expected_tokens` is what an oracle predicts the request to write; max_tokens where it is not given, which is
        right for requests that ignore EOS. `slo`: latency targets, None for the configuration's. Raises
        `InvalidRequest`, `QueueFull`, `SloRefused` (with strict admission), `EngineDead`, `EngineDraining`.
        """
        slo = self.config.slo.slo if slo is None else slo
        max_tokens = self.check(prompt_ids, params, slo)
        if expected_tokens is not None and expected_tokens < 1:
            raise InvalidRequest("expected_tokens", f"expected_tokens must be at least 1, not {expected_tokens}")
        request = Request(
            request_id or uuid4().hex, len(prompt_ids), [int(t) for t in prompt_ids], max_tokens,
            self._clock(), priority,
            reuse_prefix=params.prompt_logprobs is None, prompt_logprobs=params.prompt_logprobs is not None,
            true_len=expected_tokens, slo=slo,
        )  # fmt: skip
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        with self._lock:
            if self._health == "dead":
                raise EngineDead(self.failure or "the engine has stopped")
            if self._health == "draining":
                raise EngineDraining("the engine is shutting down")
            if self._scheduler.num_waiting + self._queued >= self.config.max_queued_requests:
                raise QueueFull(f"{self.config.max_queued_requests} requests are waiting already; try again later")
            if request.id in self._states:
                raise InvalidRequest("request_id", f"request {request.id!r} is already running")
            seed = params.seed if params.seed is not None else int(self._random.integers(0, 2**63))
            state = RequestState(request, params, seed, self.tokenizer, stop_ids, on_output)
            self._admit(request)
            self._states[request.id] = state
            self._inbox.append((state, False))
            self._queued += 1
            self._lock.notify()
        return request.id

    def cancel(self, request_id: str) -> None:
        """End a request early; it gets a last delta with finish reason "abort". Unknown ids are ignored."""
        with self._lock:
            # The session, not its id: that may belong to another request by the time the loop reads it.
            if state := self._states.get(request_id):
                self._inbox.append((state, True))
                self._lock.notify()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, slo: Slo = NONE) -> int:
        """The most tokens the request may generate. Raises `InvalidRequest`, for impossible targets too."""
        most = check_request(prompt_ids, params, self.model_config.vocab_size, self.max_model_len)
        if slo and self.warm_up.wait(0):  # before, steps are larger than they need be
            spared = 0
            if slo.ttft is not None and params.prompt_logprobs is None:
                spared = self._pool.cached(prompt_ids, len(prompt_ids) - 1)
            levels = DEPTH if self.speculator else 0
            check_possible(slo, least(self._times, levels, len(prompt_ids) - spared), self.config.slo.slo)
        return most

    def _admit(self, request: Request) -> None:
        spared = 0
        if request.reuse_prefix:
            spared = self._pool.cached(request.tokens, request.prompt_len - 1, request.page_keys)
        others = (state.request for state in self._states.values())
        self._admission.admit(request, request.prompt_len - spared, others, self._counters.experience)

    def stats(self) -> EngineStats:
        return snapshot(
            self._counters, self._scheduler, self._model_runner, self._host, self._queued, self._admission.refused,
            self._predictions.counts if self._predictions else None, self.speculator, self.warm_up,
        )  # fmt: skip

    def reset_stats(self) -> None:
        """Start the counters of steps, tokens, padding and time anew (benchmarks, after their warm-up)."""
        self._counters = Counters()

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._collect():
                self._step()
            self._end_all("abort", None)
        except Exception as error:
            log.error("the engine failed: %s", traceback.format_exc())
            with self._lock:
                self._health, self.failure = "dead", f"{type(error).__name__}: {error}"
            self._end_all("error", f"the engine failed: {self.failure}")
        finally:
            with self._lock:
                if self._health != "dead":
                    self._health, self.failure = "dead", "the engine has been shut down"
            self.warm_up.stop()
            if self._predictions:
                self._predictions.close()

    def _collect(self) -> bool:
        """Take in what arrived; sleep while there is nothing to do. False when the loop should end."""
        with self._lock:
            while not (self._inbox or self._ready) and (seconds := self._idle()) > 0:
                self._lock.release()  # compiled programs are taken over, and measured, while no request waits
                try:
                    seconds = min(seconds, self.warm_up.adopt_ready(busy=self._scheduler.has_work))
                finally:
                    self._lock.acquire()
                seconds = min(seconds, self._idle())  # what was told meanwhile counts
                if not self._inbox and seconds > 0:
                    self._lock.wait(seconds)
            arrived, self._queued = list(self._inbox), 0
            self._inbox.clear()
            stop_at = self._stop_at
        now = self._clock()
        for state, cancelled in arrived:
            if not cancelled:
                self._scheduler.add(state.request, now)
                if self._predictions:
                    self._predictions.add(state.request.id, state.request.tokens)
            elif state.finish_reason is None:
                self._scheduler.cancel(state.request.id, now)
                state.finish_reason = "abort"
                self._penalty_rows.take(state)
                self._ready.append(state)
        if stop_at is not None and (now >= stop_at or not self._scheduler.has_work):
            self._deliver()
            return False
        return True

    def _idle(self) -> float:
        """Seconds for which there is nothing to do, unless something arrives."""
        stop_at, now = self._stop_at, self._clock()
        if not self._scheduler.has_work:
            return IDLE if stop_at is None else 0.0
        # A batch that waits for more requests: the scheduler has work and none for now.
        ends = [at for at in (self._wake_at, stop_at) if at is not None]
        return 0.0 if self._wake_at is None else min(IDLE, min(ends) - now)

    def _step(self) -> None:
        """One turn: plan, launch, hand out the last step's tokens, read, take in."""
        self.warm_up.adopt_ready(busy=True)
        begun = self._clock()
        speculator = self.speculator
        if self._predictions:
            self._predictions.apply(self._scheduler.predicted, begun)
        ahead = speculator.lookahead(self._scheduler.running, begun) if speculator else NO_DRAFTS
        plan = self._scheduler.plan(begun, ahead)
        for request in (*plan.preempted, *plan.paused):
            self._penalty_rows.take(self._states[request.id])
        moving = self._clock()
        self._host.carry_out(plan)
        drafted = begun + self._clock() - moving  # when the host's part would have begun without the device's
        if not plan.scheduled:
            self._wake_at = self._scheduler.wake(begun)
            self._deliver()
            return
        self._wake_at = None
        self._penalty_rows.give([self._states[w.request.id] for w in plan.scheduled])
        parts: list[MicroBatch] = []
        if speculator:
            speculator.prefetch_features(plan.scheduled)
        for scheduled in self._micro_batches(plan.scheduled):
            states = [self._states[w.request.id] for w in scheduled]
            drafts: dict[str, Draft] = {}
            if speculator:
                begun_drafting = self._clock()
                drafts = speculator.draft(scheduled, self._sampling_inputs, sum(w.count for w in scheduled), begun)
                drafted += self._clock() - begun_drafting
            parts.append(MicroBatch.launch(scheduled, states, drafts, self._model_runner))
        if speculator:
            speculator.precompute_kv(plan.scheduled, self._sampling_inputs)
        launched = self._clock()
        for part in parts:
            for state, scheduled in zip(part.states, part.scheduled, strict=True):
                state.metrics.first_scheduled = scheduled.request.first_scheduled
        self._deliver()
        results: dict[str, RequestResult] = {}
        since = drafted if len(parts) == 1 else launched  # with the host's part, which no step is without
        for part in parts:
            packed = part.pending.packed
            self._counters.count(part.scheduled, packed, self._model_runner.positions_read(packed))
            decision = part.pending.wait()
            read = self._clock()
            if part is parts[-1]:
                self._times.observe(packed.shape.tokens, read - since)
            since = read
            results |= self._take_in(part, decision, read)
        self._counters.plain_seconds += read - drafted
        self._scheduler.update(plan, [results[w.request.id] for w in plan.scheduled], read, read - begun)
        done = self._clock()
        self._counters.host_seconds += (launched - drafted) + (done - read)
        self._counters.step_seconds += done - begun

    def _sampling_inputs(self, request: Request) -> SamplingInputs:
        return self._states[request.id].sampling()

    def _micro_batches(self, scheduled: Sequence[ScheduledRequest]) -> Sequence[Sequence[ScheduledRequest]]:
        return split(scheduled, self.speculator, self.config.micro_batches) if self.speculator else [scheduled]

    def _take_in(self, part: MicroBatch, decision: np.ndarray, now: float) -> dict[str, RequestResult]:
        """What became of the part's requests, by their ids."""
        results = {}
        for verified in part.requests(decision):
            state, draft, path = verified.state, verified.draft, verified.path
            if self.speculator and verified.scheduled.samples:
                self.speculator.observe(state.request, [n - 1 for n in path[1:]] if path else ())
            result = state.absorb(verified.scheduled, verified.tokens, part.pending.logprobs, verified.row, now, path)
            if path is not None and draft is not None:
                result = replace(result, proposed=len(draft), accepted=len(path) - 1)
                for counts in (self._counters.speculation, state.metrics.speculation):
                    counts.add(len(draft), len(path) - 1)
            if result.finish_reason is not None:
                self._penalty_rows.take(state)  # not only when it is closed: the next plan may seat another
            if result.tokens:
                self._counters.generation_tokens += len(result.tokens)
                self._ready.append(state)
                self._observe_tokens(state, len(result.tokens), now)
            results[state.request.id] = result
        return results

    def _observe_tokens(self, state: RequestState, count: int, now: float) -> None:
        last = self._last_token.get(state.request.id)
        self._last_token[state.request.id] = now
        if last is None:
            for observe_first in self.first_token_observers:
                observe_first(state.metrics)
        else:
            for observe in self.token_observers:
                observe((now - last) / count, count)

    def _deliver(self) -> None:
        """Hand out deltas and close finished sessions."""
        ready, self._ready = self._ready, []
        for state in ready:
            delta = state.delta()
            if delta is None:
                continue
            if delta.finish_reason is not None:
                state.metrics.finished = self._clock()
                swapped = self._host.quantized and state.request.swaps > 0
                state.metrics.kv_quantized = swapped or self.config.kv_cache_dtype == "int8"
                self._close(state)
            try:
                state.on_output(delta)
            except Exception:
                # The receiver's fault is not the others': its request ends, the engine goes on.
                log.exception("on_output of request %s failed; the request is cancelled", state.request.id)
                self.cancel(state.request.id)

    def _close(self, state: RequestState) -> None:
        request_id = state.request.id
        with self._lock:
            self._states.pop(request_id, None)
            self._admission.release(request_id)
        self._last_token.pop(request_id, None)
        if self.speculator:
            self.speculator.forget(state.request)
        if self._predictions:
            self._predictions.ended(request_id, state.metrics.output_tokens, state.own_end(self._eos))
        for observe in self.observers:
            try:
                observe(state.metrics, state.finish_reason or "abort")
            except Exception:
                log.exception("an observer failed")

    def _end_all(self, reason: str, error: str | None) -> None:
        """Answer everyone who still waits."""
        with self._lock:
            states = list(self._states.values())
            self._inbox.clear()
            self._queued = 0
        for state in states:
            if state.finish_reason is None:
                state.finish_reason, state.error = reason, error
                self._penalty_rows.take(state)
                if reason != "error":  # after a failure the scheduler may be in any state, and nothing will run again
                    self._scheduler.cancel(state.request.id, self._clock())
        self._ready = states
        self._deliver()
