"""Compare jaxspec with transformers on torch: same weights and prompts, greedy, float32.

The speed of a machine varies more from minute to minute than the engines differ. Therefore both stay loaded and
alternate, and the result is the ratio of their median speeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.peers.worker import Worker
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import each, terminal
from jaxspec.progress import progress

HERE = Path(__file__).parent
#: A turn is disturbed if other processes keep more than this many cores busy.
DISTURBED = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-python", required=True, metavar="EXE", help="Python interpreter that has torch and transformers"
    )
    parser.add_argument("--model", help="built-in name, .gguf file or Hugging Face directory (default: smollm2-135m)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="setting of jaxspec's engine (docs/configuration.md); repeatable",
    )  # fmt: skip
    options.add_numbers(
        parser,
        ("--threads N", 2, "CPU cores for each engine"),
        ("--batch N", 16, "prompts in the batched scenario"),
        ("--max-tokens N", 128, "output tokens per prompt"),
        ("--repeats N", 5, "measured turns per engine"),
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the comparison. Raises `BenchError` if an engine does not start or dies."""
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
    """`repeats` measured turns of each worker after a warm-up turn; the order of the workers alternates.

    Returns tokens per second of every turn by worker, the ratio of medians (first / second), the mean number of leading
    tokens that agree, the cores that other processes kept busy in each turn, and the engine stats of the jaxspec
    worker.
    """
    speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    busy_cores: dict[str, list[float]] = {worker.name: [] for worker in workers}
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
                busy_cores[worker.name].append(busy)
    first, second = (worker.name for worker in workers)
    agreed = [leading_agreement(a, b) for a, b in zip(tokens[first], tokens[second], strict=True)]
    return {
        "tokens_per_s": speeds,
        "medians": {name: median(values) for name, values in speeds.items()},
        "ratio_of_medians": median(speeds[first]) / median(speeds[second]),
        "agreeing_tokens": sum(agreed) / len(agreed),
        "cores_busy_with_others": busy_cores,
        "stats": stats,
    }


def leading_agreement(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that are the same in both outputs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the comparison, and a warning if other processes disturbed it."""
    rows = []
    for name, result in results.items():
        compared = result["ratio_of_medians"], result["agreeing_tokens"]
        for engine, speeds in result["tokens_per_s"].items():
            rows.append([name, engine, median(speeds), min(speeds), max(speeds), *compared])
            name, compared = "", (None, None)
    speeds = each(("median", "lowest", "highest"), "{:.1f}")
    ratios = ("ratio", "{:.2f}"), ("agreeing tokens", "{:.1f}")
    console = Console()
    console.print(terminal(rows, "output tokens/s", "engine", *speeds, *ratios, left=2))
    turns = [busy for result in results.values() for each in result["cores_busy_with_others"].values() for busy in each]
    if disturbed := sum(busy > DISTURBED for busy in turns):
        console.print(
            f"Unreliable: in {disturbed} of {len(turns)} turns other processes kept up to {max(turns):.1f} cores busy. "
            "Measure again on an idle machine.",
            style="red",
        )
