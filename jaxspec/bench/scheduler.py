"""What the scheduler's decisions cost: CPU time of plan and update an iteration, with many requests waiting.

Nothing is computed: every request writes at once what an imaginary device says. As many requests come as end, so that
the number of waiting ones stays the same. Beside it, what deciding on drafts costs by `tree`."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, quantiles

from rich.console import Console
from rich.table import Table

from jaxspec.bench import BenchError, drafting, options
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.progress import progress
from jaxspec.sched import PagePool, PolicyConfig, Request, RequestResult, ScheduledRequest, Scheduler, SchedulerConfig

ORDERS = ("fcfs", "sjf", "pairwise", "priority", "las", "laps_sd", "alise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="YAML files (default: each order by itself)")
    parser.add_argument("--waiting", type=options.count, default=10_000, metavar="N", help="default: 10000")
    parser.add_argument("--running", type=options.count, default=64, metavar="N", help="default: 64")
    parser.add_argument("--iterations", type=options.count, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--drafting", type=options.count, default=32, metavar="N", help="requests drafted for (32)")
    parser.add_argument(
        "--pages", type=options.count, metavar="N", help="of 32 tokens (default: 16 for each that runs)"
    )
    parser.add_argument("--host-pages", type=options.count, default=0, metavar="N", help="to swap to (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    rows: dict[str, dict[str, float]] = {}
    policies = _policies(args.presets)
    trees = drafting.measure(args.drafting, args.iterations, args.seed)
    with progress("policies", len(policies)) as advance:
        for name, policy in policies.items():
            rows[name] = measure(
                policy, args.waiting, args.running, args.iterations, args.seed, args.pages, args.host_pages
            )
            advance()
    _print("policy", rows, f"{args.waiting} waiting, {args.running} running")
    _print("tree", trees, f"{args.drafting} drafted for")
    if args.json:
        found = {"options": options.plain(args), "policies": rows, "trees": trees}
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


def _print(kind: str, rows: Mapping[str, Mapping[str, float]], title: str) -> None:
    table = Table(kind, *next(iter(rows.values())), title=title)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def _policies(presets: list[str]) -> dict[str, PolicyConfig]:
    if not presets:
        return {order: PolicyConfig.model_validate({"order": order, "predictor": "oracle"}) for order in ORDERS}
    try:
        policies = {Path(path).stem: EngineConfig.load(path).policy for path in presets}
    except ConfigError as error:
        raise BenchError(str(error)) from None
    # The requests here have no text that a trained predictor could read.
    known = {"predictor": "oracle"}
    return {n: p.model_copy(update=known) if p.predictor in ("proxy", "retrieval") else p for n, p in policies.items()}


def measure(
    policy: PolicyConfig,
    waiting: int,
    running: int,
    iterations: int,
    seed: int = 0,
    pages: int | None = None,
    host_pages: int = 0,
) -> dict[str, float]:
    """CPU milliseconds of an iteration's decisions, and what was decided. The first tenth is a warm-up, left out."""
    draw = random.Random(seed)
    config = SchedulerConfig(running, 4 * running, 1024, None, 8 * running, policy, host_pages)
    scheduler = Scheduler(config, PagePool(pages or 16 * running, 32))
    coming = _requests(draw)
    now = 0.0
    for _ in range(waiting + running):
        scheduler.add(next(coming), now)
    times: list[float] = []
    for _ in range(iterations):
        begun = time.thread_time()
        plan = scheduler.plan(now)
        planned = time.thread_time()
        results = [_outcome(scheduled, draw) for scheduled in plan.scheduled]
        now += 0.03
        again = time.thread_time()
        scheduler.update(plan, results, now, 0.03)
        times.append((planned - begun + time.thread_time() - again) * 1000)
        while scheduler.num_waiting < waiting:
            scheduler.add(next(coming), now)
        if not plan.scheduled:
            now = scheduler.wake(now) or now
    times = times[iterations // 10 :]
    return {
        "mean ms": fmean(times),
        "p99 ms": quantiles(times, n=100)[98] if len(times) > 1 else times[0],
        "max ms": max(times),
        "switches": scheduler.num_switches,
        "preemptions": scheduler.num_preemptions,
        "swaps": scheduler.num_swaps,
    }


def _requests(draw: random.Random) -> Iterator[Request]:
    """Prompts of 8 to 128 tokens that share nothing, answers of about 60 tokens with a long tail."""
    number = 0
    while True:
        prompt = draw.randint(8, 128)
        length = min(800, 1 + int(draw.expovariate(1 / 60)))
        tokens = [number % 2**31, *range(prompt - 1)]
        yield Request(str(number), prompt, tokens, 800, 0.0, draw.randint(0, 3), true_len=length)
        number += 1


def _outcome(scheduled: ScheduledRequest, draw: random.Random) -> RequestResult:
    if not scheduled.samples:
        return RequestResult()
    last = scheduled.request.output_len + 1 >= (scheduled.request.true_len or 1)
    return RequestResult((7,), "stop" if last else None, 4, draw.randint(0, 3))
