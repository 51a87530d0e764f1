"""Sends bodies to a server and checks that it stays what it was."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from jaxspec.bench.fuzz.bodies import Body, body
from jaxspec.bench.fuzz.judge import flaw
from jaxspec.bench.fuzz.server import Answer, InProcess, OverSocket
from jaxspec.engine.engine import Engine

#: Prompts whose greedy answers must never change.
_PROBES = ("The river bends and", "Zahlen: 1, 2, 3,", "漢字")
#: Seconds until an engine without requests must be idle.
_IDLE = 20.0
_HEADERS = ((b"content-type", b"application/json"),)


@dataclass
class Failure:
    """index: of the body, or of the last one before a probe failed."""

    index: int
    what: str
    body: str = ""


@dataclass
class Outcome:
    """statuses: answers by status; 0: the client left, or was cut off, before one."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    routes: Counter[str] = field(default_factory=Counter[str])
    failures: list[Failure] = field(default_factory=list[Failure])
    probes: int = 0
    slowest: float = 0.0
    #: Bytes of resident memory after the first probe, and the most after later ones.
    memory: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Limits:
    """seconds: for one answer. growth: bytes of resident memory after the first probe. every: bodies between probes."""

    seconds: float = 60.0
    growth: int = 1 << 30
    every: int = 500
    concurrency: int = 8


class _Errors(logging.Handler):
    """Collects what is logged as an error: a traceback that no client saw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"logged by {record.name}: {record.getMessage()[:300]}")


class Sweep:
    """Sends bodies `first` … of a seed through `sender` and judges the answers.

    told: called with every failure at once.
    """

    def __init__(
        self, engine: Engine, sender: InProcess | OverSocket, seed: int, limits: Limits, told: Callable[[Failure], Any]
    ) -> None:
        self._engine, self._sender, self._seed, self._limits, self._told = engine, sender, seed, limits, told
        self._expected: list[str] | None = None
        self._errors = _Errors()
        self.outcome = Outcome()

    async def run(self, first: int, count: int) -> Outcome:
        logging.getLogger().addHandler(self._errors)
        try:
            await self._probe(first)
            for start in range(first, first + count, self._limits.every):
                indices = range(start, min(start + self._limits.every, first + count))
                waiting = iter(indices)
                await asyncio.gather(*(self._worker(waiting) for _ in range(self._limits.concurrency)))
                await self._probe(indices[-1])
        finally:
            logging.getLogger().removeHandler(self._errors)
        return self.outcome

    async def _worker(self, waiting: Any) -> None:
        for index in waiting:
            await self._one(body(self._seed, index))

    async def _one(self, made: Body) -> None:
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(self._sender.send(made), self._limits.seconds)
        except TimeoutError:
            self._fail(made.index, f"no answer within {self._limits.seconds:g} s", made)
            return
        self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - began)
        self.outcome.statuses[answer.status] += 1
        self.outcome.routes[made.route] += 1
        if found := flaw(made, answer):
            self._fail(made.index, found, made)

    def _fail(self, index: int, what: str, made: Body | None = None) -> None:
        shown = "" if made is None else f"POST {made.route} {made.headers!r} {made.data[:1000]!r}"
        failure = Failure(index, what, shown)
        self.outcome.failures.append(failure)
        self._told(failure)

    async def _probe(self, index: int) -> None:
        """The engine is idle, its pool is whole, its answers are the same, and nothing went wrong unseen."""
        self.outcome.probes += 1
        answers = [await self._greedy(prompt) for prompt in _PROBES]
        if self._expected is None:
            self._expected = answers
        elif answers != self._expected:
            self._fail(index, f"greedy answers have changed: {answers}, before {self._expected}")
        end = time.monotonic() + _IDLE
        while (stats := self._engine.stats()).running or stats.waiting or stats.kv_usage or stats.host_usage:
            if time.monotonic() > end:
                left = f"running {stats.running}, waiting {stats.waiting}, KV {stats.kv_usage}, host {stats.host_usage}"
                self._fail(index, f"the engine is not idle: {left}")
                break
            await asyncio.sleep(0.01)
        if self._engine.health != "ok":
            self._fail(index, f"the engine is {self._engine.health}: {self._engine.failure}")
        if compiled := stats.compilations_after_warmup:
            self._fail(index, f"{compiled} compilations after the warm-up")
        for message in self._errors.found:
            self._fail(index, message)
        self._errors.found.clear()
        now = psutil.Process().memory_info().rss
        before, most = self.outcome.memory
        self.outcome.memory = (before or now, max(most, now))
        if before and now - before > self._limits.growth:
            self._fail(index, f"memory has grown by {(now - before) >> 20} MiB")
            self.outcome.memory = (now, now)

    async def _greedy(self, prompt: str) -> str:
        import orjson

        content = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        made = Body(-1, "/v1/completions", _HEADERS, (orjson.dumps(content),))
        answer: Answer = await asyncio.wait_for(self._sender.send(made), self._limits.seconds)
        try:
            return str(orjson.loads(answer.body)["choices"][0]["token_ids"])
        except (ValueError, LookupError, TypeError):
            return f"{answer.status} {answer.body[:200]!r}"


def summary(outcome: Outcome, seed: int, first: int, count: int) -> dict[str, Any]:
    """The outcome as an entry of `docs/results/reliability.json`."""
    return {
        "seed": seed, "first": first, "count": count,
        "statuses": {str(status): n for status, n in sorted(outcome.statuses.items())},
        "routes": dict(sorted(outcome.routes.items())), "probes": outcome.probes,
        "slowest_seconds": round(outcome.slowest, 2), "memory_mib": [b >> 20 for b in outcome.memory],
        "failures": [{"index": f.index, "what": f.what} for f in outcome.failures],
    }  # fmt: skip


def kinds(failures: Sequence[Failure]) -> Counter[str]:
    """Failures by what went wrong."""
    return Counter(failure.what[:60] for failure in failures)
