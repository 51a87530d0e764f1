"""Servers take turns: one is measured while the others are stopped, and disturbed turns are repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.client import Endpoint
from jaxspec.bench.disturbance import Disturbance, Watch
from jaxspec.bench.peers.engines import Engine
from jaxspec.bench.peers.scenarios import Prompts, Scenario, Turn, take
from jaxspec.bench.peers.server import Server

#: A turn is disturbed if steal or other processes take more than this share of the CPU time of all cores.
DISTURBED = 0.05


class Disturbed(Exception):
    """A turn stayed disturbed in all its repetitions."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`retries`: repetitions of a disturbed turn, each after `pause_s` more seconds. `allow`: then keep it."""

    repeats: int
    retries: int
    allow: bool = False
    pause_s: float = 5.0


@dataclass(slots=True)
class Measured:
    """The turns of one scenario by engine and round, and by engine why it has none."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)
    disturbances: dict[str, list[Disturbance]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        turns = {
            name: [
                {"measures": turn.measures, **asdict(disturbance), "samples": [asdict(s) for s in turn.samples]}
                for turn, disturbance in zip(turns, self.disturbances[name], strict=True)
            ]
            for name, turns in self.turns.items()
        }
        return {"turns": turns, "failed": self.failed}


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """The server runs meanwhile, and is stopped before and after."""
    server.resume()
    try:
        yield
    finally:
        server.suspend()


def alternate(
    name: str,
    scenario: Scenario,
    servers: Mapping[Engine, Server],
    prompts: Prompts,
    rules: Rules,
    seed: int,
    advance: Callable[[], None],
) -> Measured:
    """One warm-up turn and `rules.repeats` measured turns of each server, in an order that varies by round.

    All servers have the same prompts in a round, and others in the next. Raises `Disturbed`.
    """
    # One generator for each scenario: its prompts do not depend on which other scenarios run.
    rng = np.random.default_rng([seed, *name.encode()])
    found = Measured()
    running = [engine for engine in servers if engine.samples or scenario.temperature == 0]
    found.failed = {e.name: "its server cannot sample by request" for e in servers if e not in running}
    found.turns = {engine.name: [] for engine in running}
    found.disturbances = {engine.name: [] for engine in running}
    for number in range(rules.repeats + 1):
        texts = scenario.draw(prompts, rng)
        for index in rng.permutation(len(running)):
            engine = running[index]
            if engine.name in found.failed:
                advance()
                continue
            try:
                # A warm-up turn is discarded, so it may be disturbed.
                limits = rules if number else Rules(0, 0, allow=True)
                turn, disturbance = undisturbed(servers[engine], engine, scenario, texts, limits)
            except BenchError as error:
                found.failed[engine.name] = str(error)
                del found.turns[engine.name], found.disturbances[engine.name]
            else:
                if number:
                    found.turns[engine.name].append(turn)
                    found.disturbances[engine.name].append(disturbance)
            advance()
    return found


def undisturbed(
    server: Server, engine: Engine, scenario: Scenario, texts: list[str], rules: Rules
) -> tuple[Turn, Disturbance]:
    """One turn, repeated while it is disturbed. Raises `Disturbed` if it stays so and the rules do not allow it."""
    endpoint = Endpoint(server.url, engine.model, "completions", engine.fields(scenario.temperature))
    attempt = 0
    while True:
        with awake(server):
            watch = Watch(server.pid)
            turn = take(scenario, endpoint, texts)
            disturbance = watch.read()
        if disturbance.worst <= DISTURBED:
            return turn, disturbance
        if attempt == rules.retries:
            break
        attempt += 1
        time.sleep(rules.pause_s * attempt)
    if not rules.allow:
        raise Disturbed(
            f"a turn of {engine.name} was disturbed {attempt + 1} times in a row, at last by "
            f"{disturbance.steal:.0%} steal and {disturbance.foreign:.0%} load of other processes"
        )
    return turn, disturbance
