"""Serves random requests on an engine with injected faults, turn by turn, and checks everything after each turn."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import jax
import psutil

from jaxspec.bench.chaos.faults import Clock, Faults, WildPredictions
from jaxspec.bench.chaos.invariants import check_books, check_idle
from jaxspec.bench.chaos.scenario import CONTEXT, PAGE, Asked, Client, Scenario, draw, draw_client, draw_slo
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.errors import InvalidRequest
from jaxspec.models.load import LoadedModel
from jaxspec.outputs import OutputDelta
from jaxspec.sched.admission import SloRefused
from jaxspec.sched.scheduler import QueueFull

log = logging.getLogger(__name__)

#: Turns that one request may take at most, on average: more are a hang.
PATIENCE = 400
#: Requests at once from which no more arrive. Each turn looks at all of them.
CROWD = 600
#: Settings that are drawn until some are valid.
DRAWS = 50
#: Factor by which memory may grow in the second half of a scenario of at least this many requests.
GROWTH, SOAK = 1.01, 10_000


@dataclass(frozen=True)
class Answer:
    """What a request gets when it is served alone, without drafts or faults."""

    tokens: tuple[int, ...]
    text: str
    reason: str


def alone(model: LoadedModel, asked: Sequence[Asked]) -> list[Answer]:
    """The answers to these requests, one after the other on an engine without drafts, prefix cache and faults."""
    settings = {
        "max_num_seqs": 1, "max_num_batched_tokens": 64, "token_buckets": [1], "page_size": PAGE, "order": "fcfs",
        "max_model_len": CONTEXT, "kv_cache_tokens": 2 * CONTEXT, "enable_prefix_caching": False, "draft": "none",
        "predictor": "none", "memory": "recompute", "compile_in_background": False, "compilation_cache_dir": "",
    }  # fmt: skip
    engine = Engine(EngineConfig.load(None, **settings), model=model)
    found: list[Answer] = []
    for one in asked:
        deltas: list[OutputDelta] = []
        engine.submit(one.prompt, one.params, deltas.append)
        while not (deltas and deltas[-1].finish_reason):
            engine.turn()
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        found.append(Answer(tokens, "".join(delta.text for delta in deltas), deltas[-1].finish_reason or ""))
    engine.shutdown()
    return found


class Watched:
    """One request: its client, what it has got, and what it should get."""

    def __init__(self, name: str, asked: Asked, expected: Answer, client: Client) -> None:
        self.name, self.asked, self.expected, self.client = name, asked, expected, client
        self.tokens: list[int] = []
        self.text = ""
        self.deltas = 0
        self.reason: str | None = None
        self.error: str | None = None
        self.faults: list[str] = []
        self.counted: int | None = None

    def take(self, delta: OutputDelta) -> None:
        """The engine's `on_output`."""
        if self.reason is not None:
            self.faults.append("output after the last one")
        self.deltas += 1
        self.tokens += delta.token_ids
        self.text += delta.text
        self.reason, self.error = delta.finish_reason, delta.error
        if delta.metrics is not None:
            self.counted = delta.metrics.output_tokens

    def wrong(self, exact: bool) -> list[str]:
        """What is wrong about what it has got, if it has ended."""
        wrong, whole = list(self.faults), self.reason in ("stop", "length")
        expected, client = self.expected, self.client
        if exact and tuple(self.tokens) != expected.tokens[: len(self.tokens)]:
            wrong.append(f"wrong tokens: {self.tokens} for {list(expected.tokens)}")
        if exact and whole and len(self.tokens) != len(expected.tokens):
            wrong.append(f"{len(self.tokens)} tokens for {len(expected.tokens)}")
        if exact and whole and (self.text, self.reason) != (expected.text, expected.reason):
            wrong.append(f"{self.reason} {self.text!r} for {expected.reason} {expected.text!r}")
        if self.counted != len(self.tokens):
            wrong.append(f"usage of {self.counted} tokens for {len(self.tokens)}")
        if client.stays and not whole:
            wrong.append(f"ended with {self.reason}: {self.error}")
        if self.reason == "error" and client.poisonous is None:
            wrong.append(f"an error: {self.error}")
        return wrong


@dataclass
class Run:
    """What a scenario did. failures: what was wrong, in words."""

    requests: int = 0
    turns: int = 0
    tokens: int = 0
    restarts: int = 0
    #: Resident memory in MiB after half of the requests, and at the end.
    memory: tuple[float, float] = (0.0, 0.0)
    faults: Counter[str] = field(default_factory=Counter[str])
    ended: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    #: Of all that clients got, in order: the same for the same seed.
    digest: str = ""


class Driver:
    """One scenario. `asked`: requests to choose from, with their answers. `places`: for what needs several devices."""

    def __init__(
        self, model: LoadedModel, asked: Sequence[tuple[Asked, Answer]], random: Random, places: Random
    ) -> None:
        self._asked, self._random, self._places, self._clock = asked, random, places, Clock()
        self.scenario, self._engine = self._start(model)
        loop = self._engine.loop
        loop.recovery.most_restarts = 10**9
        self._faults = Faults(self._engine, places)
        if self.scenario.predicts:
            loop.predictions = WildPredictions(random)
        self._here: dict[str, Watched] = {}
        self._hash = hashlib.sha256()
        self._cancels: dict[int, list[str]] = {}
        self._last_fault = 0
        self.run = Run()

    def _start(self, model: LoadedModel) -> tuple[Scenario, Engine]:
        for _ in range(DRAWS):
            scenario = draw(self._random, self._places, jax.device_count())
            try:
                config = EngineConfig.load(None, **scenario.settings)
                return scenario, Engine(config, model=model, clock=self._clock)
            except ValueError as error:  # not all combinations are valid
                log.debug("drawn again: %s", error)
        raise RuntimeError("no valid settings drawn")

    def serve(self, requests: int) -> Run:
        """Serve this many requests. What went wrong is in the result; a failed check ends it."""
        run, engine, half = self.run, self._engine, 0.0
        try:
            while run.requests < requests or self._here:
                if not half and run.requests >= requests / 2:
                    half = _resident()
                idle = not (engine.loop.has_work or engine.loop.has_output)
                if (self._here and idle) or run.turns > PATIENCE * (run.requests + 1):
                    raise AssertionError(f"no end of {sorted(self._here)}")
                self._arrive(requests)
                if not self._here:  # the only new one was refused: a turn would wait for others
                    continue
                self._disturb()
                if engine.loop.wake_at is not None:
                    self._clock.advance(max(0.0, engine.loop.wake_at - self._clock.now))
                if not engine.turn():
                    raise AssertionError("the engine has ended")
                check_books(engine)
                run.turns += 1
            check_idle(engine)
            run.memory = half, _resident()
            if requests >= SOAK and run.memory[1] > GROWTH * half:
                raise AssertionError(f"memory grew from {half:.1f} to {run.memory[1]:.1f} MiB")
        except Exception as error:
            run.failures.append(f"turn {run.turns}: {type(error).__name__}: {error}")
        run.faults += self._faults.injected
        run.restarts, run.digest = engine.loop.recovery.count, self._hash.hexdigest()[:16]
        try:
            engine.shutdown()
        except Exception as error:
            run.failures.append(f"shutdown: {type(error).__name__}: {error}")
        return run

    def _arrive(self, requests: int) -> None:
        """Send a few requests, and cancel those whose time has come."""
        random, run = self._random, self.run
        if run.requests < requests and len(self._here) < CROWD and (not self._here or random.random() < 0.3):
            for _ in range(min(random.choice((1, 1, 2, 6)), requests - run.requests)):
                self._send()
        for name in self._cancels.pop(run.turns, ()):
            self._cancel(name)

    def _send(self) -> None:
        random, run = self._random, self.run
        asked, answer = random.choice(self._asked)
        client = draw_client(random, self.scenario)
        if client.poisonous is not None:
            asked, answer = random.choice([pair for pair in self._asked if not pair[0].random])
            asked = replace(asked, params=self._faults.poison(asked, client.poisonous, run.requests))
        watched = Watched(f"r{run.requests}", asked, answer, client)
        run.requests += 1
        try:
            self._engine.submit(
                asked.prompt, asked.params, lambda delta: self._take(watched, delta), request_id=watched.name,
                priority=random.randint(-1, 1), expected_tokens=len(answer.tokens), slo=draw_slo(random),
                tenant=random.choice(("", "a", "b")),
            )  # fmt: skip
        except (InvalidRequest, QueueFull, SloRefused) as error:
            if isinstance(error, InvalidRequest) and not error.field.startswith("slo"):
                run.failures.append(f"{watched.name} was refused: {error}")
            run.ended["refused"] += 1
            return
        self._here[watched.name] = watched
        if client.cancels == 0:
            self._cancel(watched.name)
        if client.cancels_at is not None:
            self._cancels.setdefault(run.turns + client.cancels_at, []).append(watched.name)

    def _cancel(self, name: str) -> None:
        self.run.faults["cancelled"] += name in self._here
        self._engine.cancel(name)

    def _take(self, watched: Watched, delta: OutputDelta) -> None:
        client, run = watched.client, self.run
        watched.take(delta)
        self._hash.update(repr((watched.name, delta.token_ids, delta.finish_reason)).encode())
        if watched.reason is not None:
            self._ended(watched)
        if client.cancels is not None and watched.deltas == client.cancels:
            self._cancel(watched.name)
        if client.raises is not None and watched.deltas == client.raises:
            run.faults["client's callback"] += 1
            raise ConnectionResetError("the client is gone")

    def _ended(self, watched: Watched) -> None:
        run, scenario = self.run, self.scenario
        if self._here.pop(watched.name, None) is None:
            run.failures.append(f"{watched.name} ended twice")
            return
        run.ended[watched.reason or ""] += 1
        run.tokens += len(watched.tokens)
        exact = scenario.exact and (scenario.exact_samples or not watched.asked.random)
        run.failures += [f"turn {run.turns}, {watched.name}: {what}" for what in watched.wrong(exact)]

    def _disturb(self) -> None:
        """Let something fail in the coming turn, or the clock jump."""
        random, run, scenario = self._random, self.run, self.scenario
        if random.random() < scenario.jumps:
            run.faults["clock jump"] += 1
            self._clock.advance(random.choice((0.1, 10.0, 1e5)))
        self._faults.arm(None)
        # A request that fails thrice without a token between is blamed: give each time to get one.
        if self._engine.loop.recovery.trying or run.turns - self._last_fault < scenario.gap:
            return
        if random.random() < scenario.fails:
            self._faults.arm(random.choice(self._faults.kinds))
            self._last_fault = run.turns


def _resident() -> float:
    """Resident memory of the process in MiB, without what is garbage."""
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20
