"""Measure what an ingress adds to a request: routing and dispatch, with replicas that echo.

The first row needs no Ray: the time from `RemoteEngine.submit` until the request leaves for its replica, with replicas
in this process. With --ray, echo replicas run on a local Ray cluster (extra `ray`), and each request is sent in three
ways in turn: by Ray Serve's handle alone, by the remote engine through the handle, and over HTTP through an ingress.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from random import Random
from statistics import fmean, quantiles

from rich.console import Console

from jaxspec.bench import options
from jaxspec.bench.table import each, terminal
from jaxspec.config import EngineConfig
from jaxspec.deploy.echo import Echo
from jaxspec.deploy.fleet import Fleet
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Message, Submission
from jaxspec.deploy.remote_engine import RemoteEngine
from jaxspec.models.load import load_model
from jaxspec.outputs import OutputDelta
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.routing import make_routing, routing_names

#: Requests before the measurement.
_WARM_UP = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and limits (default: %(default)s)")
    parser.add_argument(
        "--routing", default="predicted", choices=routing_names(), help="routing policy (default: %(default)s)"
    )
    options.add_numbers(
        parser,
        ("--requests N", 2000, "requests of each measurement"),
        ("--replicas N", 2, "replicas"),
        ("--concurrency N", 8, "requests at a time, in the first table"),
        ("--prompt-tokens N", 512, "tokens of each prompt"),
    )
    parser.add_argument("--ray", action="store_true", help="also measure on a local Ray cluster")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the results. Raises `BenchError` if Ray is asked for and missing."""
    prompts = _prompts(args.requests + _WARM_UP, args.prompt_tokens, args.seed)
    rows = asyncio.run(_in_process(args, prompts))
    if args.ray:
        rows |= _with_ray(args, prompts)
    table = {name: _summary(times) for name, times in rows.items()}
    title = f"ms, {args.requests} requests, {args.replicas} replicas, prompts of {args.prompt_tokens} tokens"
    _print(table, title)
    if args.json:
        Path(args.json).write_text(json.dumps({"options": options.plain(args), "milliseconds": table}, indent=2) + "\n")
    return 0


class Timed:
    """Another fleet; notes when each request leaves for its replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.left: dict[str, float] = {}

    async def names(self, fresh: bool = False) -> frozenset[str]:
        return await self._fleet.names(fresh)

    async def load(self, replica: str) -> Load:
        return await self._fleet.load(replica)

    def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        self.left[submission.id.partition("/")[0]] = time.perf_counter()
        return self._fleet.generate(replica, submission)


class _Here:
    """Echoes in this process."""

    def __init__(self, echo: Echo, replicas: int) -> None:
        self._echo, self._names = echo, frozenset(f"echo {i}" for i in range(replicas))

    async def names(self, fresh: bool = False) -> frozenset[str]:
        return self._names

    async def load(self, replica: str) -> Load:
        return await self._echo.load()

    def generate(self, replica: str, submission: Submission) -> AsyncGenerator[Message, None]:
        return self._echo.generate(submission)


def _prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of which half begin alike, so that there are prefixes to look up."""
    rng = Random(seed)
    stem = [rng.randrange(256) for _ in range(length)]
    return [
        [*stem[: length // 2], *(rng.randrange(256) for _ in range(length - length // 2))]
        if i % 2
        else [rng.randrange(256) for _ in range(length)]
        for i in range(count)
    ]


def _engine(args: argparse.Namespace, fleet: Fleet, echo: Echo) -> RemoteEngine:
    tokenizer = load_model(args.model).tokenizer
    engine = RemoteEngine(fleet, echo.facts(), tokenizer, make_routing(args.routing, Random(args.seed)))
    for _ in range(100):  # so that lengths are expected and the policy has something to weigh
        engine.lengths.ended(100)
    return engine


async def _in_process(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, list[float]]:
    echo = Echo(EngineConfig(model=args.model))
    fleet = Timed(_Here(echo, args.replicas))
    engine = _engine(args, fleet, echo)
    await engine.replicas.poll()
    engine.start()
    waiting, own = iter(enumerate(prompts)), list[float]()

    async def client() -> None:
        for i, prompt in waiting:
            begun = time.perf_counter()
            await ask(engine, prompt, str(i))
            own.append(fleet.left[str(i)] - begun)

    await asyncio.gather(*(client() for _ in range(args.concurrency)))
    await engine.close()
    return {"routing and dispatch, in process": own[_WARM_UP:]}


async def ask(engine: RemoteEngine, prompt: list[int], id: str) -> None:
    """One request for one token, to its end."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_output(delta: OutputDelta) -> None:
        if delta.finish_reason is not None and not ended.done():
            ended.set_result(None)

    engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1), on_output, request_id=id)
    await ended


def _with_ray(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, list[float]]:
    from jaxspec.deploy.ray_echo import echoes

    echo = Echo(EngineConfig(model=args.model))
    with echoes(args.model, args.replicas) as (ray_fleet, direct, http):
        fleet = Timed(ray_fleet)

        async def main() -> dict[str, list[float]]:
            engine = _engine(args, fleet, echo)
            await engine.replicas.poll()
            engine.start()
            ways: dict[str, Callable[[int, list[int]], Awaitable[None]]] = {
                "handle alone": lambda i, prompt: direct(prompt),
                "remote engine and handle": lambda i, prompt: ask(engine, prompt, str(i)),
                "HTTP, ingress, remote engine and handle": lambda i, prompt: http(prompt),
            }
            rows: dict[str, list[float]] = {name: [] for name in ways}
            own: list[float] = []
            for i, prompt in enumerate(prompts):
                for name, way in ways.items():
                    begun = time.perf_counter()
                    await way(i, prompt)
                    rows[name].append(time.perf_counter() - begun)
                    if name == "remote engine and handle":
                        own.append(fleet.left[str(i)] - begun)
            await engine.close()
            return {"routing and dispatch, with Ray": own} | rows

        return {name: times[_WARM_UP:] for name, times in asyncio.run(main()).items()}


def _summary(seconds: list[float]) -> dict[str, float]:
    ms = sorted(1000 * s for s in seconds)
    cuts = quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
    return {"mean": fmean(ms), "p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": ms[-1]}


def _print(rows: dict[str, dict[str, float]], title: str) -> None:
    columns = each(next(iter(rows.values())), "{:.2f}")
    Console().print(terminal(([name, *row.values()] for name, row in rows.items()), "", *columns, title=title))
