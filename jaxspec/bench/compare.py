"""Compare presets: one engine per preset, all in one process, alternating on the same prompts.

The speed of a machine varies more from minute to minute than presets differ. Therefore all engines stay loaded and take
turns, and the result is the ratio of their median speeds to the first preset's. A warm-up turn fills the prefix caches,
so measured turns include little prefill unless --set enable_prefix_caching=false. Suffix drafting remembers answers, so
from the second turn on it knows them, unless each turn has new prompts (--new-prompts).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.extraction import EXTRACTIONS
from jaxspec.bench.offline import tokenise
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import Column, terminal
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.errors import explained
from jaxspec.extras import install_hint
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: Fields of `EngineStats` about speculation; counted as 0 where an engine's stats lack them.
COUNTERS = ("draft_tokens", "accepted_tokens", "verifications")
#: Prompts of `learn` between which the progress bar moves.
_KNOWN_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the compared presets: its engine, and the prompts of all turns as token ids of its tokenizer."""

    name: str
    llm: LLM
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """What the turns of a concurrency ask: `size` prompts, `level` at a time; with `new`, other ones in each turn.

    params: of each prompt of all turns. turns_before: turns of other concurrencies before the first one of this.
    """

    params: Sequence[SamplingParams]
    size: int
    level: int
    new: bool = False
    turns_before: int = 0

    def prompts_of(self, turn: int) -> range:
        """Indices of the prompts of a turn (0: the first of this level)."""
        first = (self.turns_before + turn) * self.size if self.new else 0
        return range(first, first + self.size)


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass over all prompts: wall time in seconds, output token ids of each prompt, increase of each of `COUNTERS`,
    and mean E2E latency of the requests in seconds."""

    seconds: float
    answers: list[list[int]]
    counts: dict[str, int]
    e2e: float

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # argparse would print the files last, where options with several values, like --concurrency, consume them.
    parser.usage = "%(prog)s A.yaml B.yaml [C.yaml ...] [options]"
    parser.add_argument("baseline", metavar="A.yaml", help="baseline preset: the ratios are relative to it")
    parser.add_argument("others", nargs="+", metavar="B.yaml", help="presets to compare, such as configs/default.yaml")
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="engine setting for all presets (docs/configuration.md); repeatable",
    )  # fmt: skip
    options.add_numbers(engine, ("--repeats N", 5, "measured turns per preset"))
    work = parser.add_argument_group("workload")
    concurrency = (
        "prompts submitted at a time; the next N follow when all of them have finished. Several values are measured "
        "one after another (default: all prompts at once)"
    )
    work.add_argument("--concurrency", type=options.count, nargs="+", metavar="N", help=concurrency)
    options.add_numbers(
        work, ("--num-prompts N", 32, "number of prompts"), ("--max-tokens N", 128, "maximum output tokens per prompt")
    )
    work.add_argument(
        "--prompts", nargs="+", metavar="JSONL",
        help=f"{options.PROMPTS_HELP}; several files contribute equally many prompts (default: built-in prompts)",
    )  # fmt: skip
    work.add_argument(
        "--structured", action="store_true", help="built-in prompts that ask for JSON, with the schemas of the answers"
    )
    work.add_argument("--new-prompts", action="store_true", help="other prompts in each turn: N times as many are read")
    work.add_argument(
        "--known", metavar="JSONL", help="prompts that each preset answers before the turns, for suffix drafting"
    )
    options.add_numbers(work, ("--num-known N", 1000, "number of these"))
    work.add_argument("--input-tokens", type=options.span, metavar="N|LOW:HIGH", help=options.INPUT_TOKENS_HELP)
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    work.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    work.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and sampling (default: 0)")
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write all measurements, including every turn, as JSON")
    results.add_argument(
        "--plot", metavar="PNG", help=f"plot the speed of every turn; needs matplotlib: {install_hint('bench')}"
    )


def run(args: argparse.Namespace) -> int:
    """Print and write the comparison. Raises `BenchError` if nothing can be measured."""
    from jaxspec.config import parse_overrides

    try:
        overrides = parse_overrides(args.set)
        texts = asked(args)
        known = prompts.load(args.known)[: args.num_known] if args.known else []
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    presets = [args.baseline, *args.others]
    levels = list(dict.fromkeys(args.concurrency or [args.num_prompts]))
    turns = len(levels) * (args.repeats + 1)
    count = args.num_prompts * (turns if args.new_prompts else 1)
    if args.new_prompts and not args.input_tokens and count > len(texts):
        raise BenchError(f"--new-prompts: {turns} turns need {count} prompts, there are {len(texts)}")
    of_all_turns = argparse.Namespace(**{**vars(args), "num_prompts": count})
    each = with_schemas(params, prompts.choose(texts, count, random(args))) if args.structured else [params] * count
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        contenders = [
            Contender(name, llm, tokenise(llm.tokenizer, texts, of_all_turns, random(args)))
            for name, llm in zip(names(presets), load(presets, overrides, stack), strict=True)
        ]
        settings = {c.name: c.llm.engine.config.model_dump() for c in contenders}
        if known:
            learn(contenders, known, params)
        with progress("turns", len(presets) * turns) as advance:
            for i, level in enumerate(levels):
                work = Work(each, args.num_prompts, level, args.new_prompts, i * (args.repeats + 1))
                results += judge(contenders, alternate(contenders, work, args.repeats, advance), work)
    show(results, args.num_prompts * (args.repeats if args.new_prompts else 1))
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


def asked(args: argparse.Namespace) -> list[str]:
    """The prompts to choose from. Raises OSError or ValueError, also for options that exclude each other."""
    if args.structured:
        if given := [n for n in ("prompts", "input_tokens", "ignore_eos") if getattr(args, n)]:
            raise ValueError(
                f"--structured has its own prompts and answers: it excludes --{given[0].replace('_', '-')}"
            )
        return [extraction.prompt for extraction in EXTRACTIONS]
    return prompts.mixed([prompts.load(path) for path in args.prompts]) if args.prompts else list(prompts.PROMPTS)


def random(args: argparse.Namespace) -> np.random.Generator:
    """What chooses prompts: the same ones each time that it is asked for."""
    return np.random.default_rng(args.seed)


def with_schemas(params: SamplingParams, texts: Sequence[str]) -> list[SamplingParams]:
    """The parameters of each of these prompts of `EXTRACTIONS`, whose answer has a JSON schema."""
    schemas = {extraction.prompt: extraction.schema for extraction in EXTRACTIONS}
    return [replace(params, structured_outputs=StructuredOutputs(json=schemas[text])) for text in texts]


def learn(contenders: Sequence[Contender], texts: Sequence[str], params: SamplingParams) -> None:
    """Let the contenders that remember answers for suffix drafting answer these prompts, unmeasured."""
    from jaxspec.models.load.tokenizer import chat_ids

    learning = [c for c in contenders if remembers(c.llm)]
    parts = [texts[i : i + _KNOWN_AT_ONCE] for i in range(0, len(texts), _KNOWN_AT_ONCE)]
    with progress("answers before the turns", len(learning) * len(parts)) as advance:
        for contender in learning:
            for part in parts:
                with naming_preset(contender.name):
                    contender.llm.generate([chat_ids(contender.llm.tokenizer, text) for text in part], params)
                advance()


def remembers(llm: LLM) -> bool:
    """Whether one of the engine's drafters learns from answers."""
    drafters = llm.engine.speculator.drafters
    return any(isinstance(d, SuffixDrafter) and d.memory is not None for d in drafters)


def names(presets: Sequence[str]) -> list[str]:
    """A short unique name for each preset: its file name, else its path; numbered if a preset is given repeatedly."""
    stems = [Path(preset).stem for preset in presets]
    chosen = stems if len(set(stems)) == len(set(presets)) else list(presets)
    return [n if chosen.count(n) == 1 else f"{n} #{chosen[: i + 1].count(n)}" for i, n in enumerate(chosen)]


def load(presets: Sequence[str], overrides: dict[str, Any], stack: ExitStack) -> list[LLM]:
    """An engine for each preset, which `stack` closes. Raises `BenchError`."""
    from jaxspec.config import EngineConfig
    from jaxspec.llm import LLM

    for preset in presets:  # check all presets before the first engine, which takes long to load
        with naming_preset(preset):
            EngineConfig.load(preset, **overrides)
    engines = []
    for preset in presets:
        with naming_preset(preset):
            engines.append(stack.enter_context(LLM(config=preset, **{**options.COMPILE_ALL_FIRST, **overrides})))
    return engines


@contextmanager
def naming_preset(preset: str) -> Iterator[None]:
    """Convert errors to a `BenchError` that names the preset."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        message = explained(error)
        raise BenchError(message if preset in message else f"{preset}: {message}") from None


def alternate(
    contenders: Sequence[Contender], work: Work, repeats: int, advance: Callable[[], None]
) -> list[list[Turn]]:
    """`repeats` turns of each contender after one warm-up turn each. In every round the contenders run in order."""
    turns: list[list[Turn]] = [[] for _ in contenders]
    for repeat in range(repeats + 1):
        for contender, measured in zip(contenders, turns, strict=True):
            with naming_preset(contender.name):
                turn = take_turn(contender, work, repeat)
            advance()
            if repeat:
                measured.append(turn)
    return turns


def take_turn(contender: Contender, work: Work, turn: int) -> Turn:
    """Generate for all prompts of a turn."""
    llm, chosen = contender.llm, work.prompts_of(turn)
    given = [(contender.prompts[i], work.params[i]) for i in chosen]
    parts = [list(zip(*given[i : i + work.level], strict=True)) for i in range(0, len(given), work.level)]
    before = llm.engine.stats()
    begin = time.perf_counter()
    outputs = [o for ids, params in parts for o in llm.generate(list(ids), list(params))]
    seconds = time.perf_counter() - begin
    after = llm.engine.stats()
    counts = {name: getattr(after, name, 0) - getattr(before, name, 0) for name in COUNTERS}
    e2e = [output.metrics.e2e or 0.0 for output in outputs]
    return Turn(seconds, [output.outputs[0].token_ids for output in outputs], counts, fmean(e2e) if e2e else 0.0)


def judge(contenders: Sequence[Contender], turns: Sequence[Sequence[Turn]], work: Work) -> list[dict[str, Any]]:
    """Results of each contender over its turns; the first contender is the baseline. Speeds in tokens per second.

    `turn_ratios`: of speeds in the same round. `ratio`: of median speeds; with new prompts in each turn the median of
    `turn_ratios`. `mean_accepted_length`: tokens per verification, bonus token included. `agreeing_requests`: number of
    requests with exactly the tokens of the baseline's first turn in every turn; with new prompts, of the baseline's
    same turn, over all turns; None if the prompts' token ids differ.
    """
    results: list[dict[str, Any]] = []
    for contender, measured in zip(contenders, turns, strict=True):
        speeds = [turn.speed for turn in measured]
        drafted, accepted, verified = (sum(turn.counts[name] for turn in measured) for name in COUNTERS)
        pairs = list(zip(turns[0], measured, strict=True))
        ratios = [turn.speed / base.speed for base, turn in pairs]
        if work.new:
            same = [a == b for base, turn in pairs for a, b in zip(base.answers, turn.answers, strict=True)]
        else:
            same = [all(turn.answers[i] == a for turn in measured) for i, a in enumerate(turns[0][0].answers)]
        ratio = median(speeds) / median(turn.speed for turn in turns[0])
        results.append(
            {
                "preset": contender.name, "concurrency": work.level,
                "tokens_per_s": speeds, "seconds": [turn.seconds for turn in measured],
                "output_tokens": [sum(map(len, turn.answers)) for turn in measured],
                "median": median(speeds), "lowest": min(speeds), "highest": max(speeds),
                "ratio": median(ratios) if work.new else ratio, "turn_ratios": ratios,
                "mean_e2e_s": [turn.e2e for turn in measured],
                "e2e_ratio": median(turn.e2e for turn in measured) / median(turn.e2e for turn in turns[0]),
                "draft_tokens": drafted, "accepted_tokens": accepted, "verifications": verified,
                "acceptance_rate": accepted / drafted if drafted else None,
                "mean_accepted_length": 1 + accepted / verified if verified else None,
                "agreeing_requests": sum(same) if contender.prompts == contenders[0].prompts else None,
            }
        )  # fmt: skip
    return results


def show(results: Sequence[Mapping[str, Any]], requests: int) -> None:
    """Print one row per concurrency and preset; columns on speculation only if something was drafted."""
    columns: list[Column] = [
        ("at\nonce", "{}", "concurrency"), ("preset", "{}", "preset"), ("median", "{:.1f}", "median"),
        ("lowest", "{:.1f}", "lowest"), ("highest", "{:.1f}", "highest"), ("ratio", "{:.3f}", "ratio"),
        ("E2E\nratio", "{:.3f}", "e2e_ratio"), ("same", f"{{}}/{requests}", "agreeing_requests"),
    ]  # fmt: skip
    if any(r["draft_tokens"] for r in results):
        columns.append(("accepted", "{:.1%}", "acceptance_rate"))
        columns.append(("mean\nlen.", "{:.2f}", "mean_accepted_length"))
    # Without column separators the table fits into 80 characters.
    style = {"title": "output tokens/s", "box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = terminal(results, *columns, left=2, **style)
    table.columns[1].overflow = "fold"
    for column in table.columns[2:]:
        column.no_wrap = True
    Console().print(table)
