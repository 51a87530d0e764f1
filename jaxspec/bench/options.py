"""Command-line options that several benchmarks share, and how their values are read."""

from __future__ import annotations

import argparse
from typing import Any

from jaxspec.bench.report import Slo
from jaxspec.extras import install_hint

#: Settings of an engine that is to be measured: nothing compiles beside it.
COMPILE_ALL_FIRST: dict[str, Any] = {"compile_in_background": False}


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value


def finite(text: str) -> float:
    value = positive(text)
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite, not {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def span(text: str) -> tuple[int, int]:
    """`N` or `LOW:HIGH`, both ends included."""
    low, _, high = text.partition(":")
    ends = (int(low), int(high or low))
    if not 1 <= ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH with 1 <= LOW <= HIGH, not {text}")
    return ends


def add_engine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which engine."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="a built-in name, a Hugging Face folder, a .gguf file or a hub id")
    engine.add_argument("--draft", action="append", default=[], metavar="D", help="as of the server; none: no drafter")
    engine.add_argument("--config", metavar="YAML", help="a preset, as configs/default.yaml")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    return engine


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that the options of `add_engine` name. Raises `ConfigError`."""
    from jaxspec.config import parse_overrides

    chosen = {key: value for key, value in (("model", args.model), ("draft", args.draft)) if value}
    return {**parse_overrides(args.set), **chosen}


def add_workload(parser: argparse.ArgumentParser) -> None:
    """What is asked, what counts as good, and where the results go."""
    work = parser.add_argument_group("workload")
    work.add_argument("--num-prompts", type=count, default=32, metavar="N", help="default: 32")
    work.add_argument("--max-tokens", type=count, default=128, metavar="N", help="default: 128")
    work.add_argument(
        "--prompts", metavar="JSONL", help='a file of {"turns": [text, ...]} (default: the built-in prompts)'
    )
    work.add_argument("--input-tokens", type=span, metavar="N|LOW:HIGH", help="prompts of this length, uniformly drawn")
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    work.add_argument("--ignore-eos", action="store_true", help="always write --max-tokens tokens")
    work.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    goals = parser.add_argument_group("service level")
    goals.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="a good request's time to first token")
    goals.add_argument(
        "--slo-tpot-ms", type=positive, metavar="MS", help="a good request's mean time per token after it"
    )
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write everything measured, each request included")
    results.add_argument("--plot", metavar="PNG", help=f"draw the latencies; needs matplotlib: {install_hint('bench')}")


def slo(args: argparse.Namespace) -> Slo | None:
    wanted = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    return wanted if wanted else None


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """The options as given, for the JSON file: no secrets, nothing that isn't data."""
    return {k: v for k, v in vars(args).items() if k not in ("api_key", "run", "command") and not callable(v)}
