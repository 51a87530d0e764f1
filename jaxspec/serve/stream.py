"""Transfers outputs in batches from the engine's thread to the event loop and to their HTTP requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Receive

from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.scheduler import QueueFull
from jaxspec.serve import log
from jaxspec.serve.errors import ApiError, invalid
from jaxspec.slo import RequestSlo, resolve

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from jaxspec.engine.engine import Engine
    from jaxspec.serve.metrics import ServerMetrics
    from jaxspec.serve.tracing import Traces

#: Seconds from the first output to the flush. All outputs of a step arrive within it, so one wake-up suffices per step.
GATHER = 0.001
#: Headers of responses to requests whose SLO cannot be met at the moment; the value is in seconds.
_RETRY = {"Retry-After": "1"}


class ClientGone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """metrics: count prompts. log_requests: log the begin and the end of requests. keep_alive: seconds after which a
    silent stream sends a comment; 0: never. traces: send a span for each output."""

    metrics: ServerMetrics | None = None
    log_requests: bool = False
    keep_alive: float = 0.0
    traces: Traces | None = None


class OutputHub:
    """Passes outputs to the event loop's thread, with one wake-up for all outputs of a step.

    One wake-up per token would cost the engine more than the token's own host work: the loop's thread would take the
    interpreter lock during the step, once per token. `options` are those of all generations.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: HubOptions | None = None) -> None:
        self._loop = loop
        self.options = options or HubOptions()
        self._outbox: deque[tuple[Receiver, int, OutputDelta]] = deque()
        self._awake = False

    def put(self, to: Receiver, index: int, delta: OutputDelta) -> None:
        """Called in the engine's thread; never blocks."""
        self._outbox.append((to, index, delta))
        # `_flush` clears the flag before it empties the outbox, so outputs appended while the flag is set are flushed.
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed because the server has stopped
                self._loop.call_soon_threadsafe(self._loop.call_later, GATHER, self._flush)

    def _flush(self) -> None:
        self._awake = False
        while self._outbox:
            to, index, delta = self._outbox.popleft()
            try:
                to.deliver(index, delta)
            except Exception:  # the others' outputs do not wait for the next one
                getLogger(__name__).exception("an output could not be delivered")


class Receiver(Protocol):
    """Takes outputs, in the event loop's thread."""

    def deliver(self, index: int, delta: OutputDelta) -> None: ...


class Generation:
    """The sequences of one HTTP request, which are submitted, read and cancelled together. `headers` are the request's.

    Must be used in the event loop's thread.
    """

    def __init__(self, engine: Engine, hub: OutputHub, id: str, headers: Mapping[str, str]) -> None:
        self.id = id
        self._headers = headers
        self._engine = engine
        self._hub = hub
        #: Request id by index of the unfinished sequences.
        self._unfinished: dict[int, str] = {}
        #: Span by index of the sequences that have not ended, if there are traces.
        self._spans: dict[int, Span] = {}
        #: Sequences of a prompt, which are consecutive.
        self._n = 1
        #: Output tokens of the longest finished sequence, by prompt.
        self._longest: dict[int, int] = {}
        self._inbox: list[tuple[int, OutputDelta]] = []
        self._waker: asyncio.Future[None] | None = None
        self._disconnected = False

    @property
    def keep_alive(self) -> float:
        """Seconds after which a silent stream sends a comment; 0: never."""
        return self._hub.options.keep_alive

    @property
    def running(self) -> bool:
        """Whether `next` has or will have more outputs."""
        return bool(self._unfinished or self._inbox)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priority: int,
        slo: RequestSlo | None,
        predict: bool = False,
        tenant: str = "",
    ) -> None:
        """Submit sequence i with `prompts[i]` and `params[i]`; `predict`, `tenant`: see `Engine.submit`. Submits all,
        or raises `ApiError` and submits none."""
        self._n = params[0].n if params else 1
        try:
            for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
                self._submit(index, prompt, sampling, slo, priority=priority, predict=predict, tenant=tenant)
        except BaseException:
            self.close()
            raise

    def _submit(
        self, index: int, prompt: Sequence[int], params: SamplingParams, slo: RequestSlo | None, **more: Any
    ) -> None:
        logged = self._hub.options.log_requests

        def on_output(delta: OutputDelta) -> None:
            if logged and delta.finish_reason is not None:
                log.request_ends(delta)
            self._hub.put(self, index, delta)

        request_id = f"{self.id}-{index}"
        try:
            targets = resolve(slo, self._engine.config.slo)
            self._engine.submit(prompt, params, on_output, request_id=request_id, slo=targets, **more)
        except (InvalidRequest, QueueFull, SloRefused, EngineDraining, EngineDead) as e:
            raise _refusal(e) from e
        self._unfinished[index] = request_id
        if (traces := self._hub.options.traces) is not None:
            self._spans[index] = traces.begin(request_id, params, self._headers)
        if logged:
            log.request_begins(request_id, len(prompt), params.max_tokens)

    def deliver(self, index: int, delta: OutputDelta) -> None:
        """Called by the hub."""
        if delta.finish_reason is not None and (traces := self._hub.options.traces) is not None:
            traces.end(self._spans.pop(index), delta)
        if index not in self._unfinished:
            return  # cancelled
        if delta.finish_reason is not None:
            del self._unfinished[index]
            self._count(index // self._n, delta)
        self._inbox.append((index, delta))
        self._wake()

    def _count(self, prompt: int, last: OutputDelta) -> None:
        """A sequence of a prompt has ended. The last one completes the prompt's metrics."""
        tokens = last.metrics.output_tokens if last.metrics else 0
        self._longest[prompt] = max(tokens, self._longest.get(prompt, 0))
        if (metrics := self._hub.options.metrics) and all(i // self._n != prompt for i in self._unfinished):
            metrics.observe_prompt(self._n, self._longest[prompt])

    async def next(self, timeout: float | None = None) -> list[tuple[int, OutputDelta]]:
        """Wait for outputs and return all new ones as (sequence index, delta); none after `timeout` seconds without.

        Raises `ClientGone` if the client has disconnected, `ApiError` if a sequence finished with `error` or `abort`.
        """
        if not self._inbox and not self._disconnected:
            loop = asyncio.get_running_loop()
            self._waker = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake)
            try:
                await self._waker
            finally:
                if timer is not None:
                    timer.cancel()
        if self._disconnected:
            raise ClientGone
        batch, self._inbox = self._inbox, []
        for i, (_, delta) in enumerate(batch):
            if delta.finish_reason in ("error", "abort"):
                if i == 0:
                    raise self._failure(delta)
                # Return the outputs before the failure first.
                self._inbox = batch[i:]
                return batch[:i]
        return batch

    def _failure(self, delta: OutputDelta) -> ApiError:
        if delta.refused is not None:
            return _refusal(delta.refused)
        if delta.finish_reason == "abort":
            return ApiError(503, "the server aborted this request", code="aborted")
        if self._engine.health == "dead":
            return ApiError(503, f"the engine has failed: {delta.error}", code="engine_dead")
        return ApiError(500, delta.error or "the request has failed", code="engine_error")

    @contextlib.asynccontextmanager
    async def attached(self, receive: Receive) -> AsyncIterator[None]:
        """Inside the context a client disconnect ends `next`; on exit unfinished sequences are cancelled."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watch.cancel()
            self.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def close(self) -> None:
        """Cancel the unfinished sequences."""
        for request_id in self._unfinished.values():
            self._engine.cancel(request_id)
        self._unfinished.clear()


def _refusal(e: Exception) -> ApiError:
    """The response to a request that the engine does not take."""
    match e:
        case InvalidRequest():
            return invalid(e)
        case QueueFull():
            headers = {"Retry-After": str(ceil(e.retry_after))}
            return ApiError(429, f"the server is busy: {e}", code="queue_full", headers=headers)
        case SloRefused():
            return ApiError(429, str(e), param="slo", code="slo_unattainable", headers=_RETRY)
        case EngineDraining():
            return ApiError(503, "the server is shutting down", code="draining")
        case _:
            return ApiError(503, f"the engine has failed: {e}", code="engine_dead")
