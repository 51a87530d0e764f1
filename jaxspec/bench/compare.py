"""Presets beside each other: an engine for each, all in one process, taking turns on the same prompts.

Speeds of one machine differ from minute to minute by more than presets do, so all engines stay loaded and alternate,
and what counts is the ratio of their medians. The warm-up turn leaves the prompts in the prefix caches: turns measure
little prefill unless --set enable_prefix_caching=false.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.offline import tokenise
from jaxspec.bench.report import machine, write_json
from jaxspec.errors import explained
from jaxspec.extras import install_hint
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: Fields of `EngineStats` that say how drafting went; an engine that doesn't draft may lack them.
COUNTERS = ("draft_tokens", "accepted_tokens", "verifications")


@dataclass(frozen=True, slots=True)
class Contender:
    """A preset's engine, and the prompts as token ids of its own tokenizer."""

    name: str
    llm: LLM
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass over all prompts: wall time in seconds, each answer's token ids, growth of each of `COUNTERS`, and mean
    completion time of the requests (E2E) in seconds."""

    seconds: float
    answers: list[list[int]]
    counts: dict[str, int]
    e2e: float

    @property
    def speed(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.answers)) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # argparse would put the files last, where a list like that of --concurrency swallows them.
    parser.usage = "%(prog)s A.yaml B.yaml [C.yaml ...] [options]"
    parser.add_argument("baseline", metavar="A.yaml", help="the preset that the others are compared with")
    parser.add_argument("others", nargs="+", metavar="B.yaml", help="more presets, as configs/default.yaml")
    engine = parser.add_argument_group("engines")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all; may be given again")
    engine.add_argument("--repeats", type=options.count, default=5, metavar="N", help="measured turns (default: 5)")
    work = parser.add_argument_group("workload")
    at_once = "N prompts at a time, the next N when these have ended; of several N each is measured (default: all)"
    work.add_argument("--concurrency", type=options.count, nargs="+", metavar="N", help=at_once)
    work.add_argument("--num-prompts", type=options.count, default=32, metavar="N", help="default: 32")
    work.add_argument("--max-tokens", type=options.count, default=128, metavar="N", help="default: 128")
    work.add_argument(
        "--prompts", nargs="+", metavar="JSONL",
        help='files of {"turns": [text, ...]}, of several as many prompts each (default: built-in ones)',
    )  # fmt: skip
    work.add_argument("--input-tokens", type=options.span, metavar="N|LOW:HIGH", help="prompts of this length")
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    work.add_argument("--ignore-eos", action="store_true", help="always write --max-tokens tokens")
    work.add_argument("--seed", type=int, default=0, help="of prompts, lengths and sampling")
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write everything measured, each turn included")
    results.add_argument("--plot", metavar="PNG", help=f"draw the turns; needs matplotlib: {install_hint('bench')}")


def run(args: argparse.Namespace) -> int:
    """Prints and writes the comparison. Raises `BenchError` where nothing can be measured."""
    from jaxspec.config import parse_overrides

    try:
        overrides = parse_overrides(args.set)
        texts = prompts.mixed([prompts.load(path) for path in args.prompts]) if args.prompts else list(prompts.PROMPTS)
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    presets = [args.baseline, *args.others]
    levels = list(dict.fromkeys(args.concurrency or [args.num_prompts]))
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        contenders = [
            Contender(name, llm, tokenise(llm.tokenizer, texts, args, np.random.default_rng(args.seed)))
            for name, llm in zip(names(presets), load(presets, overrides, stack), strict=True)
        ]
        settings = {c.name: c.llm.engine.config.model_dump() for c in contenders}
        with progress("turns", len(levels) * len(presets) * (args.repeats + 1)) as advance:
            for level in levels:
                results += judge(contenders, alternate(contenders, params, level, args.repeats, advance), level)
    show(results, args.num_prompts)
    if args.json:
        about = {"kind": "compare", "machine": machine(), "options": options.plain(args), "settings": settings}
        write_json(args.json, about | {"results": results})
    if args.plot:
        from jaxspec.bench import plot

        panels: dict[str, dict[str, list[float]]] = {f"{level} at a time": {} for level in levels}
        for r in results:
            panels[f"{r['concurrency']} at a time"][r["preset"]] = r["tokens_per_s"]
        plot.turns(args.plot, panels, "output tokens/s")
    return 0


def names(presets: Sequence[str]) -> list[str]:
    """Short but different: file names if these tell the presets apart, numbered where a preset is given again."""
    stems = [Path(preset).stem for preset in presets]
    chosen = stems if len(set(stems)) == len(set(presets)) else list(presets)
    return [n if chosen.count(n) == 1 else f"{n} #{chosen[: i + 1].count(n)}" for i, n in enumerate(chosen)]


def load(presets: Sequence[str], overrides: dict[str, Any], stack: ExitStack) -> list[LLM]:
    """An engine for each preset, which `stack` will close. Raises `BenchError`."""
    from jaxspec.config import EngineConfig
    from jaxspec.llm import LLM

    for preset in presets:  # all of them before the first engine: that takes its time
        with naming(preset):
            EngineConfig.load(preset, **overrides)
    engines = []
    for preset in presets:
        with naming(preset):
            engines.append(
                stack.enter_context(
                    LLM(config=preset, show_progress=True, **{**options.COMPILE_ALL_FIRST, **overrides})
                )
            )
    return engines


@contextmanager
def naming(preset: str) -> Iterator[None]:
    """Turns what goes wrong with a preset into a `BenchError` that names it."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        said = explained(error)
        raise BenchError(said if preset in said else f"{preset}: {said}") from None


def alternate(
    contenders: Sequence[Contender], params: SamplingParams, level: int, repeats: int, advance: Callable[[], None]
) -> list[list[Turn]]:
    """`repeats` turns of each contender, after one that only warms up; they go one after the other, in order."""
    turns: list[list[Turn]] = [[] for _ in contenders]
    for repeat in range(repeats + 1):
        for contender, own in zip(contenders, turns, strict=True):
            with naming(contender.name):
                turn = take_turn(contender, params, level)
            advance()
            if repeat:
                own.append(turn)
    return turns


def take_turn(contender: Contender, params: SamplingParams, level: int) -> Turn:
    """All prompts, `level` at a time."""
    llm, given = contender.llm, contender.prompts
    before = llm.engine.stats()
    begin = time.perf_counter()
    outputs = [o for i in range(0, len(given), level) for o in llm.generate(given[i : i + level], params)]
    seconds = time.perf_counter() - begin
    after = llm.engine.stats()
    counts = {name: getattr(after, name, 0) - getattr(before, name, 0) for name in COUNTERS}
    e2e = [output.metrics.e2e or 0.0 for output in outputs]
    return Turn(seconds, [output.outputs[0].token_ids for output in outputs], counts, fmean(e2e) if e2e else 0.0)


def judge(contenders: Sequence[Contender], turns: Sequence[Sequence[Turn]], level: int) -> list[dict[str, Any]]:
    """What came of the measured turns of each contender, the first being the baseline; speeds in tokens a second.

    `mean_accepted_length` is in tokens a verification: those accepted and one of the target's own. `agreeing_requests`
    have, in every turn, exactly the tokens of the baseline's first turn; None if the prompts' token ids differ already.
    """
    reference = turns[0][0].answers
    results: list[dict[str, Any]] = []
    for contender, own in zip(contenders, turns, strict=True):
        speeds = [turn.speed for turn in own]
        drafted, accepted, verified = (sum(turn.counts[name] for turn in own) for name in COUNTERS)
        same = [all(turn.answers[i] == answer for turn in own) for i, answer in enumerate(reference)]
        results.append(
            {
                "preset": contender.name, "concurrency": level,
                "tokens_per_s": speeds, "seconds": [turn.seconds for turn in own],
                "output_tokens": [sum(map(len, turn.answers)) for turn in own],
                "median": median(speeds), "lowest": min(speeds), "highest": max(speeds),
                "ratio": median(speeds) / (results[0]["median"] if results else median(speeds)),
                "mean_e2e_s": [turn.e2e for turn in own],
                "e2e_ratio": median(turn.e2e for turn in own) / median(turn.e2e for turn in turns[0]),
                "draft_tokens": drafted, "accepted_tokens": accepted, "verifications": verified,
                "acceptance_rate": accepted / drafted if drafted else None,
                "mean_accepted_length": 1 + accepted / verified if verified else None,
                "agreeing_requests": sum(same) if contender.prompts == contenders[0].prompts else None,
            }
        )  # fmt: skip
    return results


def show(results: Sequence[Mapping[str, Any]], requests: int) -> None:
    """A row for each concurrency and preset; what comes of drafting only if something was drafted."""
    columns = {
        "median": ("median", "{:.1f}"), "lowest": ("lowest", "{:.1f}"), "highest": ("highest", "{:.1f}"),
        "ratio": ("ratio", "{:.3f}"), "E2E\nratio": ("e2e_ratio", "{:.3f}"),
        "same": ("agreeing_requests", f"{{}}/{requests}"),
    }  # fmt: skip
    if any(r["draft_tokens"] for r in results):
        columns |= {"accepted": ("acceptance_rate", "{:.1%}"), "mean\nlen.": ("mean_accepted_length", "{:.2f}")}
    # Without lines between its columns it fits into 80 characters.
    table = Table("at\nonce", title="output tokens/s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("preset", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        cells = ("–" if r[key] is None else form.format(r[key]) for key, form in columns.values())
        table.add_row(str(r["concurrency"]), escape(r["preset"]), *cells)
    Console().print(table)
