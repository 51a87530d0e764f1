"""Measure the scheduler's CPU time per step (plan and update) with many waiting requests.

No model runs: results are drawn at random. Finished requests are replaced, so the number of waiting requests stays
constant. A second table has the CPU time of the speculator's decisions for each tree policy.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, quantiles

from rich.console import Console

from jaxspec.bench import BenchError, drafting, options
from jaxspec.bench.table import each, terminal
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.progress import progress
from jaxspec.sched import PagePool, PolicyConfig, Request, RequestResult, ScheduledRequest, Scheduler, SchedulerConfig
from jaxspec.sched.slots import ORDERS, PREDICTORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "presets", nargs="*", metavar="PRESET", help="presets (YAML files) to measure (default: every order, alone)"
    )
    options.add_numbers(
        parser,
        ("--waiting N", 10_000, "waiting requests"),
        ("--running N", 64, "maximum number of running requests"),
        ("--iterations N", 2000, "steps, of which the first tenth is a warm-up"),
        ("--drafting N", 32, "running requests in the measurement of tree policies"),
    )
    parser.add_argument(
        "--pages", type=options.count, metavar="N", help="KV pages of 32 tokens (default: 16 per running request)"
    )
    parser.add_argument(
        "--host-pages", type=options.count, default=0, metavar="N",
        help="KV pages in host memory for swapping (default: none)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and results (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the results. Raises `BenchError` for a preset with errors."""
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
    _print("tree", trees, f"{args.drafting} running, speculator only")
    if args.json:
        results = {"options": options.plain(args), "policies": rows, "trees": trees}
        Path(args.json).write_text(json.dumps(results, indent=1))
    return 0


def _print(kind: str, rows: Mapping[str, Mapping[str, float]], title: str) -> None:
    columns = each(next(iter(rows.values())), lambda value: f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(terminal(([name, *row.values()] for name, row in rows.items()), kind, *columns, title=title))


def _policies(presets: list[str]) -> dict[str, PolicyConfig]:
    if not presets:
        return {order: PolicyConfig.model_validate({"order": order, "predictor": "oracle"}) for order in ORDERS.names}
    try:
        policies = {Path(path).stem: EngineConfig.load(path).policy for path in presets}
    except ConfigError as error:
        raise BenchError(str(error)) from None
    # The requests have no text that a length predictor could read.
    oracle = {"predictor": "oracle"}
    return {n: p.model_copy(update=oracle) if PREDICTORS.selected(p).reader else p for n, p in policies.items()}


def measure(
    policy: PolicyConfig,
    waiting: int,
    running: int,
    iterations: int,
    seed: int = 0,
    pages: int | None = None,
    host_pages: int = 0,
) -> dict[str, float]:
    """CPU milliseconds of plan and update per step, and counts of the scheduler's decisions.

    The times omit the first tenth of the iterations (warm-up).
    """
    rng = random.Random(seed)
    config = SchedulerConfig(running, 4 * running, 1024, None, 8 * running, policy, host_pages)
    scheduler = Scheduler(config, PagePool(pages or 16 * running, 32))
    arrivals = _requests(rng)
    now = 0.0
    for _ in range(waiting + running):
        scheduler.add(next(arrivals), now)
    times: list[float] = []
    for _ in range(iterations):
        plan_start = time.thread_time()
        plan = scheduler.plan(now)
        plan_end = time.thread_time()
        results = [_result(scheduled, rng) for scheduled in plan.scheduled]
        now += 0.03
        update_start = time.thread_time()
        scheduler.update(plan, results, now, 0.03)
        times.append((plan_end - plan_start + time.thread_time() - update_start) * 1000)
        while scheduler.num_waiting < waiting:
            scheduler.add(next(arrivals), now)
        if not plan.scheduled:
            now = scheduler.wake(now) or now
    times = times[iterations // 10 :]
    return {
        "mean ms": fmean(times),
        "p99 ms": quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0],
        "max ms": max(times),
        "pauses": scheduler.num_pauses,
        "preemptions": scheduler.num_preemptions,
        "swaps": scheduler.num_swaps,
    }


def _requests(rng: random.Random) -> Iterator[Request]:
    """Requests with prompts of 8 to 128 tokens without common prefixes. Output lengths are exponentially distributed
    with mean 60, cut at 800 tokens."""
    number = 0
    while True:
        prompt = rng.randint(8, 128)
        length = min(800, 1 + int(rng.expovariate(1 / 60)))
        tokens = [number % 2**31, *range(prompt - 1)]
        yield Request(str(number), prompt, tokens, 800, 0.0, rng.randint(0, 3), true_len=length)
        number += 1


def _result(scheduled: ScheduledRequest, rng: random.Random) -> RequestResult:
    """One token per decoding request, `stop` at its true length; of four drafts a random number is accepted."""
    if not scheduled.samples:
        return RequestResult()
    last = scheduled.request.output_len + 1 >= (scheduled.request.true_len or 1)
    return RequestResult((7,), "stop" if last else None, 4, rng.randint(0, 3))
