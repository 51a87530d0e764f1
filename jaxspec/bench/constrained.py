"""Measure what token masks cost, and how many draft tokens are accepted under a schema.

Two engines, without drafts and with draft trees, answer prompts that ask for JSON. They take turns within one run, and
in each turn every kind of constraint: none; any text, a grammar that forbids no text; and JSON, the schema of the
prompt.

Speed: all answers have --max-tokens tokens, so that batches have the same sizes with every constraint. Acceptance:
answers end by themselves.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.contender import load, naming_preset
from jaxspec.bench.extraction import EXTRACTIONS, Extraction
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import median as middle
from jaxspec.bench.table import spread, terminal
from jaxspec.errors import explained
from jaxspec.outputs import SpeculationCounts
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxspec.llm import LLM

FREE, ANY, JSON = CONSTRAINTS = ("none", "any text", "JSON")
#: Step time and TPOT with a constraint, relative to those without: without drafts, and with trees.
GOALS = (1.05, 1.15)
#: More answers than fit: an array of them does not end before --max-tokens.
_ENDLESS = 100_000


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine: `goal` is one of `GOALS`, `prompts` are token ids, as many as requests at once."""

    name: str
    llm: LLM
    goal: float
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Speed:
    """A turn of answers of equal length. Milliseconds: mean TPOT, median time between the steps of a request, and mean
    host time of a step; draft tokens per step."""

    tpot_ms: float
    step_ms: float
    host_ms: float
    drafted: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A turn of answers of their own length: how many are complete, their tokens, and the drafts of all of them."""

    complete: int
    tokens: int
    drafts: SpeculationCounts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--config", default="configs/fcfs.yaml", metavar="YAML", help="preset without drafts (default: %(default)s)"
    )
    engine.add_argument(
        "--tree-config", default="configs/specinfer.yaml", metavar="YAML",
        help="preset that drafts whether it pays or not (default: %(default)s)",
    )  # fmt: skip
    engine.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="engine setting for both presets (docs/configuration.md); repeatable",
    )  # fmt: skip
    work = parser.add_argument_group("workload")
    options.add_numbers(
        work,
        ("--repeats N", 5, "measured turns of each engine and constraint"),
        ("--concurrency N", 16, "requests at once"),
        ("--max-tokens N", 128, "output tokens per request"),
    )
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write all measurements, including every turn, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the results. Raises `BenchError` if nothing can be measured."""
    from jaxspec.config import parse_overrides
    from jaxspec.models.load.tokenizer import chat_ids

    if args.max_tokens < 2:
        raise BenchError("--max-tokens must be at least 2: a TPOT needs two tokens")
    try:
        overrides = parse_overrides(args.set)
    except ValueError as error:
        raise BenchError(explained(error)) from None
    presets = [args.config, args.tree_config]
    names = options.preset_names(presets)
    asked = list(islice(cycle(EXTRACTIONS), args.concurrency))
    with ExitStack() as stack:
        contenders = [
            Contender(name, llm, goal, [chat_ids(llm.tokenizer, e.prompt) for e in asked])
            for name, llm, goal in zip(names, load(presets, overrides, stack), GOALS, strict=True)
        ]
        settings = {c.name: c.llm.engine.config.model_dump() for c in contenders}
        with progress("turns", 2 * len(contenders) * len(CONSTRAINTS) * (args.repeats + 1)) as advance:
            speeds = alternate(contenders, asked, args.repeats, args.max_tokens, take_speed, advance)
            accepted = alternate(contenders, asked, args.repeats, args.max_tokens, take_acceptance, advance)
    found = [
        judge(contender, constraint, speeds, accepted) for contender in contenders for constraint in CONSTRAINTS
    ]  # fmt: skip
    about = {"kind": "constrained", "command": command(args), "machine": machine(), "options": options.plain(args)}
    show(found, about)
    if args.json:
        write_json(args.json, about | {"settings": settings, "results": found})
    return 0


Take = Callable[[Contender, str, Sequence[Extraction], int], Any]


def alternate(
    contenders: Sequence[Contender], asked: Sequence[Extraction], repeats: int, tokens: int, take: Take,
    advance: Callable[[], None],
) -> dict[tuple[str, str], list[Any]]:  # fmt: skip
    """`repeats` turns by engine and constraint, after one each in which grammars are compiled and prompts cached."""
    turns: dict[tuple[str, str], list[Any]] = {(c.name, kind): [] for c in contenders for kind in CONSTRAINTS}
    for repeat in range(repeats + 1):
        for contender in contenders:
            for constraint in CONSTRAINTS:
                with naming_preset(contender.name):
                    turn = take(contender, constraint, asked, tokens)
                advance()
                if repeat:
                    turns[contender.name, constraint].append(turn)
    return turns


def take_speed(contender: Contender, constraint: str, asked: Sequence[Extraction], tokens: int) -> Speed:
    """All prompts at once, each answered with `tokens` tokens."""
    engine = contender.llm.engine
    engine.reset_stats()
    gaps: list[float] = []
    observe = lambda seconds, count: gaps.append(seconds * count)  # noqa: E731
    engine.token_observers.append(observe)
    try:
        outputs = contender.llm.generate(contender.prompts, [of_length(constraint, e.schema, tokens) for e in asked])
    finally:
        engine.token_observers.remove(observe)
    stats = engine.stats()
    if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
        raise BenchError(f"an answer with the constraint {constraint!r} has not {tokens} tokens")
    per_step = 1 / max(1, stats.steps)
    return Speed(
        1e3 * fmean(output.metrics.tpot or 0.0 for output in outputs), 1e3 * median(gaps),
        1e3 * stats.host_seconds * per_step, stats.draft_tokens * per_step,
    )  # fmt: skip


def take_acceptance(contender: Contender, constraint: str, asked: Sequence[Extraction], tokens: int) -> Acceptance:
    """All prompts at once, answered with at most `tokens` tokens."""
    outputs = contender.llm.generate(contender.prompts, [of_any_length(constraint, e.schema, tokens) for e in asked])
    drafts = SpeculationCounts()
    for output in outputs:
        drafts.merge(output.metrics.speculation)
    answers = [output.outputs[0] for output in outputs]
    return Acceptance(sum(a.finish_reason == "stop" for a in answers), sum(len(a.token_ids) for a in answers), drafts)


def of_length(constraint: str, schema: Mapping[str, Any], tokens: int) -> SamplingParams:
    """Parameters of an answer of exactly `tokens` tokens."""
    if constraint == FREE:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    many = {"type": "array", "items": schema, "minItems": _ENDLESS}
    structure = _structure(constraint, many)
    return SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, structured_outputs=structure)


def of_any_length(constraint: str, schema: Mapping[str, Any], tokens: int) -> SamplingParams:
    """Parameters of an answer that may end before `tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, structured_outputs=_structure(constraint, schema))


def _structure(constraint: str, schema: Mapping[str, Any]) -> StructuredOutputs | None:
    if constraint == FREE:
        return None
    return StructuredOutputs(regex=r"(.|\n)*") if constraint == ANY else StructuredOutputs(json=schema)


def judge(
    contender: Contender,
    constraint: str,
    speeds: Mapping[tuple[str, str], Sequence[Speed]],
    accepted: Mapping[tuple[str, str], Sequence[Acceptance]],
) -> dict[str, Any]:
    """The row of an engine and a constraint. Ratios are of medians, to the same engine without a constraint.

    `mean_accepted_length`: tokens per verification by turn, bonus token included; empty without verifications.
    """
    key, free = (contender.name, constraint), (contender.name, FREE)
    turns, drafts = speeds[key], [turn.drafts for turn in accepted[key]]

    def ratio(of: Callable[[Speed], float]) -> float | None:
        base = median(map(of, speeds[free]))
        return median(map(of, turns)) / base if base else None

    return {
        "preset": contender.name, "constraint": constraint, "goal": contender.goal,
        "tpot_ms": [t.tpot_ms for t in turns], "tpot_ratio": ratio(lambda t: t.tpot_ms),
        "step_ms": [t.step_ms for t in turns], "step_ratio": ratio(lambda t: t.step_ms),
        "host_ms": [t.host_ms for t in turns], "draft_tokens_per_step": [t.drafted for t in turns],
        "answers": len(contender.prompts), "complete": [t.complete for t in accepted[key]],
        "output_tokens": [t.tokens for t in accepted[key]],
        "draft_tokens": [d.proposed for d in drafts], "accepted_tokens": [d.accepted for d in drafts],
        "verifications": [d.verifications for d in drafts],
        "mean_accepted_length": [d.mean_accepted_length for d in drafts if d.verifications],
    }  # fmt: skip


def command(args: argparse.Namespace) -> str:
    """The command of the run, with the defaults written out."""
    words = ["python", "-m", "jaxspec.bench", "constrained"]
    for name, value in options.plain(args).items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            words += [option, str(each)]
    return shlex.join(words)


def show(found: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Print the command, the machine, and a table each of speed and of acceptance."""
    console, asked = Console(), about["options"]
    on = about["machine"]
    console.print(about["command"], soft_wrap=True, markup=False, highlight=False)
    console.print(f"{on['processor']}, {on['cores']} cores", soft_wrap=True, markup=False, highlight=False)
    rows = [("engine", "{}", "preset"), ("constraint", "{}", "constraint")]
    several, whole = spread("{:.1f}", "{:.0f}"), middle("{:.0f}")
    tables = [
        (
            f"{asked['concurrency']} requests of {asked['max_tokens']} tokens at once, median (range) of "
            f"{asked['repeats']} turns; goals for the ratios: {GOALS[0]} without drafts, {GOALS[1]} with trees",
            [
                ("TPOT, ms", several, "tpot_ms"), ("ratio", "{:.3f}", "tpot_ratio"),
                ("step, ms", several, "step_ms"), ("ratio", "{:.3f}", "step_ratio"),
            ],
        ),
        (
            "the same, per step: host time and draft tokens",
            [("host, ms", spread("{:.2f}", "{:.2f}"), "host_ms"), ("drafted", whole, "draft_tokens_per_step")],
        ),
        (
            "answers of their own length",
            [
                ("complete", lambda row: f"{median(row['complete']):.0f}/{row['answers']}", lambda row: row),
                ("tokens", whole, "output_tokens"), ("verifications", whole, "verifications"),
                ("accepted length", spread("{:.2f}", "{:.2f}"), "mean_accepted_length"),
            ],
        ),
    ]  # fmt: skip
    for title, columns in tables:
        console.print(terminal(found, *rows, *columns, left=2, title=title))
