"""jaxspec beside transformers on torch: same weights, same prompts, greedy float32, taking turns in one run.

Speeds of one machine differ from minute to minute by more than engines do, so both stay loaded and alternate, and what
is reported is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.peers.worker import Worker
from jaxspec.bench.report import machine, write_json
from jaxspec.progress import progress

HERE = Path(__file__).parent
#: Cores that others may keep busy in a turn before its time is worth little.
DISTURBED = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", required=True, metavar="EXE", help="a Python with torch and transformers")
    parser.add_argument("--model", help="a built-in name, a .gguf file or a Hugging Face folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of jaxspec's engine")
    parser.add_argument("--threads", type=options.count, default=2, metavar="N", help="cores for each (default: 2)")
    parser.add_argument("--batch", type=options.count, default=16, metavar="N", help="prompts at once (default: 16)")
    parser.add_argument("--max-tokens", type=options.count, default=128, metavar="N", help="each (default: 128)")
    parser.add_argument("--repeats", type=options.count, default=5, metavar="N", help="turns of each (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    """Prints and writes the comparison. Raises `BenchError` when an engine doesn't start or dies."""
    from jaxspec.config import parse_overrides
    from jaxspec.models.load import DEFAULT_MODEL, ModelLoadError
    from jaxspec.models.load.registry import TABLE, fetch

    model = args.model or DEFAULT_MODEL
    try:
        path = str(fetch(TABLE[model]) if model in TABLE else Path(model).expanduser().resolve())
        overrides = parse_overrides(args.set)
    except (ModelLoadError, ValueError) as error:
        raise BenchError(str(error)) from None

    ours_at = [sys.executable, "-m", "jaxspec.bench.peers.with_jaxspec"]
    theirs_at = [args.peer_python, str(HERE / "with_transformers.py")]
    with (
        Worker("jaxspec", ours_at, {"model": model, "threads": args.threads, "overrides": overrides}) as ours,
        Worker("transformers", theirs_at, {"path": path, "threads": args.threads}) as theirs,
    ):
        ids = ours.ask({"encode": list(prompts.PROMPTS)})["ids"]
        scenarios = {
            f"1 prompt × {args.max_tokens} tokens": ids[6:7],
            f"{args.batch} prompts × {args.max_tokens} tokens": [ids[i % len(ids)] for i in range(args.batch)],
        }
        results = {}
        with progress("turns", 2 * len(scenarios) * (args.repeats + 1)) as advance:
            for name, given in scenarios.items():
                turn = {"prompts": given, "max_tokens": args.max_tokens}
                results[name] = alternate((ours, theirs), turn, args.repeats, advance)
    show(results)
    if args.json:
        about = {"kind": "peers", "machine": machine(), "options": options.plain(args)}
        write_json(args.json, about | {"results": results})
    return 0


def alternate(
    workers: tuple[Worker, Worker], turn: Mapping[str, Any], repeats: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """`repeats` measured turns of each worker after one that isn't, the first to go changing from one to the next.

    Returns tokens a second of every turn by worker, the ratio of medians (first over second), how many leading tokens
    of an answer agree on average, the cores that others kept busy in each turn, and the first worker's own counters.
    """
    speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    others: dict[str, list[float]] = {worker.name: [] for worker in workers}
    tokens: dict[str, list[list[int]]] = {}
    stats: dict[str, Any] | None = None
    for repeat in range(repeats + 1):
        for worker in workers if repeat % 2 else workers[::-1]:
            answer, busy = worker.timed(turn)
            advance()
            tokens[worker.name] = answer["tokens"]
            stats = answer.get("stats", stats)
            if repeat:
                speeds[worker.name].append(sum(map(len, answer["tokens"])) / answer["seconds"])
                others[worker.name].append(busy)
    first, second = (worker.name for worker in workers)
    agreed = [leading_agreement(a, b) for a, b in zip(tokens[first], tokens[second], strict=True)]
    return {
        "tokens_per_s": speeds,
        "medians": {name: median(values) for name, values in speeds.items()},
        "ratio_of_medians": median(speeds[first]) / median(speeds[second]),
        "agreeing_tokens": sum(agreed) / len(agreed),
        "cores_busy_with_others": others,
        "stats": stats,
    }


def leading_agreement(a: list[int], b: list[int]) -> int:
    """How many tokens two answers share before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("output tokens/s", "engine", "median", "lowest", "highest", "ratio", "tokens that agree")
    for name, result in results.items():
        for i, (engine, speeds) in enumerate(result["tokens_per_s"].items()):
            ratio = (f"{result['ratio_of_medians']:.2f}", f"{result['agreeing_tokens']:.1f}") if i == 0 else ("", "")
            row = (median(speeds), min(speeds), max(speeds))
            table.add_row(name if i == 0 else "", engine, *(f"{speed:.1f}" for speed in row), *ratio)
    console = Console()
    console.print(table)
    turns = [busy for result in results.values() for each in result["cores_busy_with_others"].values() for busy in each]
    if disturbed := sum(busy > DISTURBED for busy in turns):
        console.print(
            f"In {disturbed} of {len(turns)} turns other programs kept up to {max(turns):.1f} cores busy: "
            "these numbers say little. Measure again on a quiet machine.",
            style="red",
        )
