"""A replica: an engine that serves what ingresses send it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from jaxspec.deploy.load import NOTHING, Attainment, Load, report, waiting_tokens
from jaxspec.deploy.messages import Admitted, Facts, Message, Outputs, Refused, Submission
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import EngineStats
from jaxspec.errors import EngineDead
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.serve.stream import OutputHub


class Replica:
    """Serves the requests of ingresses with a started engine. Used in one event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._attainment = Attainment()
        self._hub: OutputHub | None = None
        engine.observers.append(self._observe)

    def _observe(self, metrics: RequestMetrics, finish_reason: str) -> None:
        if finish_reason in ("stop", "length"):
            self._attainment.observe(metrics, time.monotonic())

    def facts(self) -> Facts:
        """What ingresses must know of the engine."""
        e = self.engine
        return Facts(e.model_names, e.max_model_len, e.model_config.vocab_size, e.config, e.default_sampling)

    def shutdown(self) -> None:
        """Stop the engine. Unfinished requests are handed over."""
        self.engine.shutdown()

    def check_health(self) -> None:
        """Raises `EngineDead` if the engine has failed: then it must be replaced."""
        if self.engine.health == "dead":
            raise EngineDead(self.engine.failure or "the engine has stopped")

    async def load(self) -> Load:
        """The replica's load at the end of the current step. For a failed engine: only that it has failed."""
        try:
            made = await asyncio.wrap_future(self.engine.between_steps(report))
        except EngineDead:
            return Load(NOTHING, EngineStats(), "dead")
        return Load(made, self.engine.stats(), self.engine.health)

    async def scaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads, by name: see `jaxspec.deploy.autoscaling`."""
        waiting = await asyncio.wrap_future(self.engine.between_steps(waiting_tokens))
        finished, attained = self._attainment.counts(time.monotonic())
        stats, slots = self.engine.stats(), self.engine.config.max_num_seqs
        return {
            "waiting_tokens": float(waiting),
            "occupancy": (stats.running + stats.waiting) / slots,
            "slo_finished": float(finished),
            "slo_attained": float(attained),
        }

    async def generate(self, submission: Submission) -> AsyncGenerator[Message, None]:
        """Serve a request: `Admitted`, then `Outputs` up to the last one. Closing the generator cancels it.

        `Refused` at first: it is not served; later: it cannot be served to its end here.
        """
        self._hub = self._hub or OutputHub(asyncio.get_running_loop())
        engine, stream, resumed = self.engine, _Stream(), submission.resumed
        try:
            await engine.constraints.compile_aside(submission.params)
            engine.submit(
                submission.prompt, submission.params, partial(self._hub.put, stream, 0), request_id=submission.id,
                priority=submission.priority, slo=submission.slo, predict=submission.predict, tenant=submission.tenant,
                resumed=resumed, waited=submission.waited,
            )  # fmt: skip
        except Exception as error:
            yield Refused.by(error)
            return
        offset, ended = len(resumed or ()), False
        try:
            yield Admitted()
            while not ended:
                deltas = await stream.next()
                ended = deltas[-1].finish_reason is not None
                stopped = self._stopped(deltas[-1])
                if stopped is not None:  # what it flushed at the end is not what comes next
                    deltas = deltas[:-1]
                if deltas:
                    yield Outputs(offset, tuple(_sent(d, d is deltas[0] and not offset) for d in deltas))
                    offset += sum(len(delta.token_ids) for delta in deltas)
                if stopped is not None:
                    yield stopped
        finally:
            if not ended:
                engine.cancel(submission.id)

    def _stopped(self, last: OutputDelta) -> Refused | None:
        """Why another replica should go on: this one is stopping or has failed."""
        if last.finish_reason == "abort" or (last.finish_reason == "error" and self.engine.health == "dead"):
            return Refused("lost", last.error or "the replica is stopping")
        return None


def _sent(delta: OutputDelta, first: bool) -> OutputDelta:
    """The delta as it is sent: metrics go on changing, and most clients need none in between."""
    if (metrics := delta.metrics) is None or not (first or delta.finish_reason):
        return replace(delta, metrics=None)
    return replace(delta, metrics=replace(metrics))


class _Stream:
    """The deltas of one request that have not been sent."""

    def __init__(self) -> None:
        self._deltas: deque[OutputDelta] = deque()
        self._come = asyncio.Event()

    def deliver(self, index: int, delta: OutputDelta) -> None:
        """Called by the hub."""
        self._deltas.append(delta)
        self._come.set()

    async def next(self) -> list[OutputDelta]:
        """All that have come, at least one."""
        await self._come.wait()
        self._come.clear()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas
