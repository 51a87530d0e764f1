"""Command-line options shared by several benchmarks, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.report import Slo
from jaxspec.extras import install_hint
from jaxspec.sched.slo import Slo as SchedulerSlo

#: Settings of a measured engine: no compilation in the background.
COMPILE_ALL_FIRST: dict[str, Any] = {"compile_in_background": False}
PROMPTS_HELP = 'JSONL file with one {"turns": ["text", ...]} per line; the first text is the prompt'
INPUT_TOKENS_HELP = "prompts of N tokens, or uniformly distributed from LOW to HIGH tokens"
TRACE_HELP = (
    "arrivals: a CSV file with the column arrival_s and optionally input_tokens, output_tokens, a CSV file as Azure or "
    "BurstGPT publish theirs, or a .jsonl file in Mooncake's format"
)
BURSTINESS_HELP = (
    "coefficient of variation of the gaps between arrivals: 0 equal gaps, 1 Poisson arrivals, above 1 bursts "
    "(default: 1)"
)


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def finite(text: str) -> float:
    value = positive(text)
    if value == float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite, got {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def span(text: str) -> tuple[int, int]:
    """`N` or `LOW:HIGH` as (low, high), both inclusive."""
    low, _, high = text.partition(":")
    ends = (int(low), int(high or low))
    if not 1 <= ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH with 1 <= LOW <= HIGH, got {text}")
    return ends


def add_numbers(parser: argparse._ActionsContainer, *numbers: tuple[str, float, str]) -> None:
    """Add options of ("--name METAVAR", default, help): counts if the default is an int, else positive numbers."""
    for name, default, text in numbers:
        option, metavar = name.split()
        kind = count if isinstance(default, int) else positive
        help_text = f"{text} (default: {default:g})"
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=help_text)


def add_engine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that select and configure the engine. Returns their group."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model", help="built-in name, Hugging Face directory, .gguf file or hub id (default: smollm2-135m)"
    )
    engine.add_argument(
        "--draft", action="append", default=[], metavar="DRAFTER",
        help="drafter, same values as --draft of jaxspec.serve; none: no speculative decoding; repeatable",
    )  # fmt: skip
    engine.add_argument("--config", metavar="YAML", help="preset, such as configs/default.yaml")
    engine.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="engine setting (docs/configuration.md), overrides the preset; repeatable",
    )  # fmt: skip
    return engine


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Settings given by the options of `add_engine`. Raises `ConfigError`."""
    from jaxspec.config import parse_overrides

    chosen = {key: value for key, value in (("model", args.model), ("draft", args.draft)) if value}
    return {**parse_overrides(args.set), **chosen}


def add_workload(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of the workload, the SLO and the results. Returns the group of the results."""
    work = parser.add_argument_group("workload")
    add_numbers(
        work,
        ("--num-prompts N", 32, "number of requests"),
        ("--max-tokens N", 128, "maximum output tokens per request"),
    )
    work.add_argument("--prompts", metavar="JSONL", help=f"{PROMPTS_HELP} (default: built-in prompts)")
    work.add_argument("--input-tokens", type=span, metavar="N|LOW:HIGH", help=INPUT_TOKENS_HELP)
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    work.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    work.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals (default: 0)")
    add_slo(parser)
    return add_outputs(parser)


def add_slo(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add `--slo-ttft-ms` and `--slo-tpot-ms`."""
    group = parser.add_argument_group("SLO", f"Latency targets used to compute SLO attainment and goodput{default}.")
    group.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="target time to first token (TTFT)")
    group.add_argument(
        "--slo-tpot-ms", type=positive, metavar="MS",
        help="target mean time per output token after the first (TPOT)",
    )  # fmt: skip


def add_outputs(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add `--json` and `--plot`. Returns their group."""
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write all measurements, including every request, as JSON")
    results.add_argument(
        "--plot", metavar="PNG",
        help=f"plot the distributions of TTFT and TPOT; needs matplotlib: {install_hint('bench')}",
    )  # fmt: skip
    return results


def slo(args: argparse.Namespace) -> Slo | None:
    """The SLO given by the options; None if they set no target."""
    targets = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    return targets if targets else None


def slo_settings(args: argparse.Namespace) -> list[str]:
    """Latency targets of the command line as engine settings, KEY=VALUE, so that the scheduler knows them."""
    targets = {"slo.ttft_ms": args.slo_ttft_ms, "slo.tpot_ms": args.slo_tpot_ms}
    return [f"{key}={target}" for key, target in targets.items() if target is not None]


def seconds(slo: Slo | None) -> SchedulerSlo:
    """Convert latency targets to the scheduler's form, in seconds."""
    targets = slo or Slo()
    return SchedulerSlo(*(None if ms is None else ms / 1000 for ms in (targets.tpot_ms, targets.ttft_ms)))


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """The options as given, for the JSON file, without the API key and callables."""
    given = {k: v for k, v in vars(args).items() if k not in ("api_key", "run", "command") and not callable(v)}
    return {k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in given.items()}


def preset_names(presets: Sequence[str]) -> list[str]:
    """A short unique name for each preset: its file name, else its path; numbered if a preset is given repeatedly."""
    stems = [Path(preset).stem for preset in presets]
    chosen = stems if len(set(stems)) == len(set(presets)) else list(presets)
    return [n if chosen.count(n) == 1 else f"{n} #{chosen[: i + 1].count(n)}" for i, n in enumerate(chosen)]
