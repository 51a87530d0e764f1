"""The engine: the threads around the engine loop. Submit, cancel, admission, health, shutdown."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar
from uuid import uuid4

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.constraints.build import Constraints
from jaxspec.draft.registry import flush, runners
from jaxspec.engine.calls import Calls
from jaxspec.engine.live_view import INTERVAL, OnSnapshot
from jaxspec.engine.loop import EngineLoop
from jaxspec.engine.metrics import Counters, EngineStats, snapshot
from jaxspec.engine.queue_limit import QueueLimit
from jaxspec.engine.request_state import RequestState
from jaxspec.engine.startup import for_device, start_up
from jaxspec.engine.summary import summary
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import OutputDelta
from jaxspec.predict.predictor import LengthPredictor
from jaxspec.sampling_params import SamplingParams, check_request, check_tokens
from jaxspec.sched.admission import SloAdmission, tightest_slo
from jaxspec.sched.request import Request
from jaxspec.sched.slo import NONE, Slo
from jaxspec.sched.slots import PACES
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.sched.timing import StepTimes
from jaxspec.slo import check_possible
from jaxspec.step.profiles import Profile
from jaxspec.step.warmup import Progress, silent

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Longest sleep of an idle engine, in seconds. A new request wakes it at once.
IDLE = 1.0


class Engine:
    """Serves one model. `submit` and `cancel` may be called from any thread; `on_output` runs in the engine's thread.

    Args:
        config: all settings.
        model, proxy: an already loaded target model and length predictor, as tests pass them; None: load by `config`.
        progress: called with (stage, done, total) during the start.
        clock: monotonic seconds.
        renew_profiles: measure step times again even if stored ones exist.

    Raises `ConfigError` and `ModelLoadError`.
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
        config = for_device(config)
        self.config, self._clock = config, clock
        parts = start_up(config, model, proxy, progress, clock, renew_profiles)
        self.tokenizer, self.model_config = parts.model.tokenizer, parts.model.config
        #: The names of the model in the API, and the first of them.
        self.model_names = config.served_model_name or [parts.model.name]
        self.model_name = self.model_names[0]
        self.max_model_len = parts.max_model_len
        #: Sampling parameters of HTTP requests that do not set them, by name: see `generation_config`.
        self.default_sampling = parts.model.sampling
        #: Builds the constraints of requests.
        self.constraints = Constraints(self.tokenizer, self.model_config.vocab_size)
        #: Which programs are compiled, and which are still being compiled in the background.
        self.warm_up = parts.warm_up
        self._admission = SloAdmission(
            parts.model_runner.times,
            parts.scheduler.lengths,
            strict=config.slo.admission == "strict",
            paced=PACES.selected(config).throttles,
            max_num_seqs=config.max_num_seqs,
        )
        self._pool = parts.pool
        #: Step times as profiled, corrected by the steps since.
        self.step_times: StepTimes = parts.model_runner.times
        self._random = np.random.default_rng(config.seed)
        self._states: dict[str, RequestState] = {}
        self.loop = EngineLoop(config, parts, clock, self._states, self._closed, self.cancel)
        #: See `EngineLoop`; append a callable to be called.
        self.observers = self.loop.observers
        self.token_observers = self.loop.token_observers
        self.first_token_observers = self.loop.first_token_observers
        self.step_observers = self.loop.step_observers

        self._lock = threading.Condition()
        self._inbox: deque[tuple[RequestState, bool]] = deque()  # (request, False: it is new; True: cancel it)
        self._queued = 0  # new requests in the inbox
        self._limit = QueueLimit(
            config.max_queued_requests, config.max_queue_wait_ms, clock,
            lambda: (self.loop.num_waiting + self._queued, self.loop.scheduler.num_free),
        )  # fmt: skip
        self._calls = Calls()
        self.health = "ok"  # or draining, dead
        self._stop_at: float | None = None  # when a drain ends at the latest
        self.failure: str | None = None
        self._thread: threading.Thread | None = None

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def speculator(self) -> Speculator:
        """Decides on drafts; without drafters there are none."""
        return self.loop.speculator

    @property
    def profiled(self) -> list[Profile]:
        """Measured times of the step programs and of all draft models' rounds."""
        return [self.loop.model_runner.profile, *(runner.profile for runner in runners(self.speculator))]

    def start(self) -> None:
        """Start the engine's thread and the background compilation."""
        self.loop.predictions.start()
        self._thread = threading.Thread(target=self._run, name="jaxspec-engine", daemon=True)
        self._thread.start()
        self.warm_up.start(busy=lambda: bool(self.loop.has_work or self._inbox), wake=self._notify)

    def _notify(self) -> None:
        with self._lock:
            self._lock.notify()

    def shutdown(self, drain: bool = False, timeout: float = 30.0) -> None:
        """Stop the engine. With `drain`, requests get `timeout` seconds to finish; the rest are aborted."""
        with self._lock:
            if self.health == "ok":
                self.health = "draining"
            self._stop_at = self._clock() + (timeout if drain else 0.0)
            self._lock.notify()
        self.warm_up.stop()
        self.constraints.close()
        if self._thread is None:
            self._abort_all("abort", None)
            self.health, self.failure = "dead", "the engine has been shut down"
            self._calls.fail(EngineDead(self.failure))
            flush(self.speculator)
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
        end_as_expected: bool = False,
        slo: Slo | None = None,
        predict: bool = False,
        tenant: str = "",
        resumed: Sequence[int] | None = None,
        waited: float = 0.0,
    ) -> str:
        """Queue a request. -> its id. `on_output` gets its deltas; the last one has a finish reason.

        Args:
            params: `n` is ignored; submit n requests instead.
            priority: smaller goes first, with `order: priority`.
            expected_tokens: output length for oracle predictors; defaults to max_tokens.
            end_as_expected: end the answer after `expected_tokens`, for benchmarks with given lengths. Apart from
                oracles, the scheduler knows only `max_tokens`.
            slo: SLO in seconds; None: the configuration's.
            predict: predict its length even if it never waits.
            tenant: whose it is; each has a share of the queue, and suffix drafting learns from its own answers only.
            resumed: not None: another engine has admitted it and has generated these output tokens, which may be none.
                So neither a full queue nor its SLO refuses it. The tokens count as output but are in no delta. Greedy,
                or with the seed of `params` set, it goes on with the tokens that the other engine would have sampled
                (not with `acceptance: rejection` or INT8 KV).
            waited: seconds that it has waited elsewhere; they count for aging.

        Raises `InvalidRequest`, `QueueFull`, `SloRefused` (strict admission), `EngineDead`, `EngineDraining`.
        """
        slo = self.config.slo.slo if slo is None else slo
        # Whether its SLO is possible depends on what is cached where it is asked.
        max_tokens = self._check(prompt_ids, params, slo if resumed is None else NONE)
        before = [int(t) for t in resumed or ()]
        check_tokens("resumed", before, self.model_config.vocab_size)
        if expected_tokens is not None and expected_tokens < 1:
            raise InvalidRequest("expected_tokens", f"expected_tokens must be at least 1, not {expected_tokens}")
        if end_as_expected and expected_tokens is None:
            raise InvalidRequest("end_as_expected", "end_as_expected needs expected_tokens")
        # The prompt's log-probabilities come with the first output token.
        scores_prompt = params.prompt_logprobs is not None and not before
        request = Request(
            request_id or uuid4().hex, len(prompt_ids), [*map(int, prompt_ids), *before], max_tokens,
            self._clock(), priority, resumed=len(before), waited=waited,
            reuse_prefix=not scores_prompt, prompt_logprobs=scores_prompt,
            true_len=expected_tokens, slo=slo, tenant=tenant,
        )  # fmt: skip
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.loop.eos)
        constraint = self.constraints.of(params, stop_ids)
        request.forced = None if constraint is None else constraint.forced
        with self._lock:
            if self.health == "dead":
                raise EngineDead(self.failure or "the engine has stopped")
            if self.health == "draining":
                raise EngineDraining("the engine is shutting down")
            if resumed is None:
                self._limit.check(tenant, self._states.values())
            if request.id in self._states:
                raise InvalidRequest("request_id", f"request {request.id!r} is already running")
            seed = params.seed if params.seed is not None else int(self._random.integers(0, 2**63))
            end = expected_tokens if end_as_expected else None
            state = RequestState(request, params, seed, self.tokenizer, stop_ids, on_output, end, predict, constraint)
            state.resume(before)
            self._admit(request, resumed is not None)
            self._states[request.id] = state
            self._inbox.append((state, False))
            self._queued += 1
            self._lock.notify()
        return request.id

    def cancel(self, request_id: str) -> None:
        """End a request early; its last delta has finish reason "abort". Unknown ids are ignored."""
        with self._lock:
            # Queue the state, not the id: another request may have the id when the loop reads the inbox.
            if state := self._states.get(request_id):
                self._inbox.append((state, True))
                self._lock.notify()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, slo: Slo = NONE) -> int:
        """Check a request. -> its maximum output tokens. Raises `InvalidRequest`, also for an SLO no step can meet."""
        max_tokens = self._check(prompt_ids, params, slo)
        self.constraints.of(params, ())  # compiles and keeps its grammar
        return max_tokens

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams, slo: Slo) -> int:
        """`check` without its constraint, which `submit` builds anyway."""
        max_tokens = check_request(prompt_ids, params, self.model_config.vocab_size, self.max_model_len)
        if slo and self.warm_up.wait(0):  # before that, steps run in larger buckets than needed
            cached = 0
            if slo.ttft is not None and params.prompt_logprobs is None:
                cached = self._pool.cached(prompt_ids, len(prompt_ids) - 1)
            depth = DEPTH if self.speculator.drafters else 0
            check_possible(slo, tightest_slo(self.step_times, depth, len(prompt_ids) - cached), self.config.slo.slo)
        return max_tokens

    def _admit(self, request: Request, admitted: bool) -> None:
        """Raises `SloRefused` if strict admission refuses the request, unless another engine has admitted it."""
        cached = 0
        if request.reuse_prefix:
            cached = self._pool.cached(request.tokens, len(request.tokens) - 1, request.page_keys)
        others, seen = (state.request for state in self._states.values()), self.loop.counters.load
        self._admission.admit(request, len(request.tokens) - cached, others, seen, admitted, self._limit.tenants)

    def between_steps(self, call: Callable[[EngineLoop], T]) -> Future[T]:
        """Have the engine's thread call this with its loop before its next step. -> the result.

        The future fails with what `call` raises, or with `EngineDead` if the engine stops before.
        """
        with self._lock:
            future = self._calls.add(call)
            if self.health == "dead":
                self._calls.fail(EngineDead(self.failure or "the engine has stopped"))
            self._lock.notify()
        return future

    def stats(self) -> EngineStats:
        """A snapshot of all counters."""
        return snapshot(self.loop, self._queued, self._limit.refused, self._admission.refused)

    def summary(self, preset: str | None = None) -> list[tuple[str, str]]:
        """What the engine runs with, as (subject, value). `preset`: the file that the settings come from."""
        return summary(self, preset)

    def watch(self, on_snapshot: OnSnapshot) -> Callable[[], None]:
        """Call `on_snapshot` with a `LiveSnapshot` a few times per second, in the engine's thread. -> ends that.

        It must return quickly. Without watchers, this costs the engine nothing.
        """
        stop = self.loop.live.add(on_snapshot)
        self._notify()
        return stop

    def reset_stats(self) -> None:
        """Reset the counters of steps, tokens, padding and time. Benchmarks do so after their warm-up."""
        self.loop.counters = Counters()

    def set_speculation(
        self, speculator: Speculator, micro_batches: int | None = None, draft_turns: bool | None = None
    ) -> None:
        """Draft with another speculator of the engine's drafters, for benchmarks that compare policies.

        The settings are as in `EngineConfig`, None: as configured. Raises `RuntimeError` while there are requests.
        """
        with self._lock:
            if self._states:
                raise RuntimeError("the speculator cannot change while there are requests")
            launcher = self.loop.launcher
            launcher.speculator, launcher.micro_batches = speculator, micro_batches or self.config.micro_batches
            launcher.draft_turns = self.config.draft_turns if draft_turns is None else draft_turns

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Wait for something to do, and run a step. False: it ends. Raises errors after too many restarts in place."""
        try:
            if running := self._collect():
                self.loop.step()
        except Exception as error:
            running = self.loop.recovery.recover(error)
        return running

    def _run(self) -> None:
        try:
            while self.turn():
                pass
            self._abort_all("abort", None)
        except BaseException as error:  # the panic of Rust code is no `Exception`
            log.exception("the engine failed")
            with self._lock:
                self.health, self.failure = "dead", f"{type(error).__name__}: {error}"
            self._abort_all("error", f"the engine failed: {self.failure}")
        finally:
            with self._lock:
                if self.health != "dead":
                    self.health, self.failure = "dead", "the engine has been shut down"
                self._calls.fail(EngineDead(self.failure))
            self.warm_up.stop()
            self.loop.predictions.close()
            flush(self.speculator)

    def _collect(self) -> bool:
        """Pass new and cancelled requests to the loop; sleep while there is nothing to do. False: end the loop."""
        with self._lock:
            self._limit.turn(self.loop.num_waiting)
            while not (self._inbox or self._calls or self.loop.has_output) and (seconds := self._idle_seconds()) > 0:
                self._lock.release()  # adopt and measure compiled programs while no request waits
                try:
                    seconds = min(seconds, self.warm_up.adopt_ready(busy=self.loop.has_work))
                    if self.loop.live.watched:
                        self.loop.live.look(self._clock())
                        seconds = min(seconds, INTERVAL)
                finally:
                    self._lock.acquire()
                seconds = min(seconds, self._idle_seconds())  # a shutdown may have begun meanwhile
                if not (self._inbox or self._calls) and seconds > 0:
                    self._lock.wait(seconds)
            arrived, self._queued = list(self._inbox), 0
            self._inbox.clear()
            stop_at = self._stop_at
        now = self._clock()
        for state, cancelled in arrived:
            if not cancelled:
                self.loop.add(state, now)
            elif state.finish_reason is None:
                self.loop.abort(state, now)
        self._calls.make(self.loop)
        if stop_at is not None and (now >= stop_at or not self.loop.has_work):
            self.loop.deliver()
            return False
        return True

    def _idle_seconds(self) -> float:
        """Seconds until there is something to do, unless something arrives."""
        stop_at, now = self._stop_at, self._clock()
        if not self.loop.has_work:
            return IDLE if stop_at is None else 0.0
        # With dynamic batching the scheduler may have requests but no work yet.
        wake_at = self.loop.wake_at
        ends = [at for at in (wake_at, stop_at) if at is not None]
        return 0.0 if wake_at is None else min(IDLE, min(ends) - now)

    def _closed(self, state: RequestState) -> None:
        with self._lock:
            self._states.pop(state.request.id, None)
            self._limit.ended(served=state.request.first_scheduled is not None)
            self._admission.release(state.request.id)

    def _abort_all(self, reason: str, error: str | None) -> None:
        """End all requests that have not finished."""
        with self._lock:
            states = list(self._states.values())
            self._inbox.clear()
            self._queued = 0
        self.loop.abort_all(states, reason, error)
