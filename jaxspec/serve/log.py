"""Log lines of a server: its throughput every few seconds, and on request every request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec.outputs import OutputDelta, RequestMetrics

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.metrics import EngineStats

log = logging.getLogger(__name__)

#: Seconds between two throughput lines, as in vLLM.
INTERVAL = 10.0


class ThroughputLog:
    """Logs the engine's throughput every `interval` seconds. Silent while the engine is idle."""

    def __init__(self, engine: Engine, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._interval = interval
        self._last, self._at = engine.stats(), time.monotonic()
        #: Whether each finished request met its SLOs, of those that had one, since the last line.
        self._attained: list[bool] = []
        engine.observers.append(self._on_finished)

    def _on_finished(self, metrics: RequestMetrics, finish_reason: str) -> None:
        """Called in the engine's thread."""
        if (attained := metrics.slo_attained) is not None and finish_reason in ("stop", "length"):
            self._attained.append(attained)

    async def run(self) -> None:
        """Log until the task is cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            now, stats = time.monotonic(), self._engine.stats()
            attained, self._attained = self._attained, []
            if line := throughput(self._last, stats, now - self._at, attained):
                log.info(line)
            self._last, self._at = stats, now


def throughput(before: EngineStats, now: EngineStats, seconds: float, attained: Sequence[bool] = ()) -> str | None:
    """The line for the `seconds` between two snapshots. None if nothing ran in them and nothing runs now.

    `attained`: whether each of the requests that finished met its SLOs, of those with one.
    """

    def grown(name: str) -> int:
        return max(0, getattr(now, name) - getattr(before, name))  # `reset_stats` sets counters back

    prompt, output = grown("prompt_tokens"), grown("generation_tokens")
    if not (prompt or output or now.running or now.waiting):
        return None
    parts = [
        f"prompt throughput: {prompt / seconds:.1f} tokens/s",
        f"generation throughput: {output / seconds:.1f} tokens/s",
        f"running: {now.running}",
        f"waiting: {now.waiting}",
        f"KV cache usage: {now.kv_usage:.1%}",
    ]
    if queries := grown("prefix_queries"):
        parts.append(f"prefix cache hit rate: {grown('prefix_hits') / queries:.1%}")
    if drafted := grown("draft_tokens"):
        accepted, verifications = grown("accepted_tokens"), grown("verifications")
        parts.append(f"acceptance rate: {accepted / drafted:.1%}")
        parts.append(f"mean accepted length: {1 + accepted / max(1, verifications):.2f}")
    if attained:
        parts.append(f"SLO attainment: {sum(attained) / len(attained):.1%} of {len(attained)}")
    return ", ".join(parts)


def request_begins(request_id: str, prompt_tokens: int, max_tokens: int | None) -> None:
    """Log a request that the engine has taken."""
    log.info("request %s: prompt tokens: %d, max_tokens: %s", request_id, prompt_tokens, max_tokens)


def request_ends(delta: OutputDelta) -> None:
    """Log a request whose last output is `delta`. Called in the engine's thread."""
    parts = [f"finish reason: {delta.finish_reason}"]
    if (m := delta.metrics) is not None:
        parts.append(f"output tokens: {m.output_tokens}")
        parts += [f"{name}: {1000 * s:.1f} ms" for name, s in (("TTFT", m.ttft), ("E2E", m.e2e)) if s is not None]
    log.info("request %s: %s", delta.request_id, ", ".join(parts))
