"""Compare presets: one engine per preset, all in one process, alternating on the same prompts.

The speed of a machine varies more from minute to minute than presets differ. Therefore all engines stay loaded and take
turns, and the result are ratios to the first preset in the same round, with 95 % intervals over the rounds. A ratio
whose interval includes 1 is marked ≈: the turns do not show a difference. A warm-up turn fills the prefix caches,
so measured turns include little prefill unless --set enable_prefix_caching=false. Suffix drafting remembers answers, so
from the second turn on it knows them, unless each turn has new prompts (--new-prompts).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.contender import Contender, learn, load
from jaxspec.bench.extraction import EXTRACTIONS
from jaxspec.bench.offline import tokenise
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import UNKNOWN, Column, each, shown, terminal
from jaxspec.bench.turns import COUNTERS, METRICS, Turn, Work, alternate, is_noise, ratio
from jaxspec.errors import explained
from jaxspec.extras import install_hint
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


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
    when = parser.add_argument_group("arrivals", "Default: --concurrency. Each turn has the same arrivals.")
    when.add_argument(
        "--request-rate", type=options.finite, metavar="R",
        help="mean requests per second; with --trace, rescales its arrival times",
    )  # fmt: skip
    when.add_argument("--burstiness", type=float, default=1.0, metavar="CV", help=options.BURSTINESS_HELP)
    when.add_argument(
        "--trace", metavar="FILE", help=f"{options.TRACE_HELP}; its lengths are those of prompts, and max_tokens"
    )
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
    options.add_slo(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write all measurements, including every turn, as JSON")
    results.add_argument(
        "--plot",
        metavar="PNG",
        help=f"plot the speed of every turn, and with arrivals latencies; needs matplotlib: {install_hint('bench')}",
    )


def run(args: argparse.Namespace) -> int:
    """Print and write the comparison. Raises `BenchError` if nothing can be measured."""
    from jaxspec.config import parse_overrides

    try:
        overrides = parse_overrides([*args.set, *options.slo_settings(args)])
        texts, times = asked(args), arrived(args)
        known = prompts.load(args.known)[: args.num_known] if args.known else []
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if times:
        overrides.setdefault("max_queued_requests", len(times))
    size = len(times) if times else args.num_prompts
    presets = [args.baseline, *args.others]
    levels = list(dict.fromkeys(args.concurrency or [size]))
    turns = len(levels) * (args.repeats + 1)
    count = size * (turns if args.new_prompts else 1)
    with_lengths = any(a.input_tokens for a in times or ())
    if args.new_prompts and not (args.input_tokens or with_lengths) and count > len(texts):
        raise BenchError(f"--new-prompts: {turns} turns need {count} prompts, there are {len(texts)}")
    each = with_schemas(params, prompts.choose(texts, count, random(args))) if args.structured else [params] * count
    if times and any(a.output_tokens for a in times):
        most = [a.output_tokens or args.max_tokens for a in times]
        each = [replace(one, max_tokens=most[i % size]) for i, one in enumerate(each)]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        contenders = [
            Contender(name, llm, prompt_ids(llm.tokenizer, texts, args, count, times))
            for name, llm in zip(options.preset_names(presets), load(presets, overrides, stack), strict=True)
        ]
        settings = {c.name: c.llm.engine.config.model_dump() for c in contenders}
        if known:
            learn(contenders, known, params)
        with progress("turns", len(presets) * turns) as advance:
            for i, level in enumerate(levels):
                work = Work(
                    each, size, level, args.new_prompts, i * (args.repeats + 1),
                    [a.time for a in times] if times else None, options.slo(args),
                )  # fmt: skip
                results += judge(contenders, alternate(contenders, work, args.repeats, advance), work)
    show(results, size * (args.repeats if args.new_prompts else 1), bool(times))
    if args.json:
        about = {"kind": "compare", "machine": machine(), "options": options.plain(args), "settings": settings}
        write_json(args.json, about | {"results": results})
    if args.plot:
        draw(args.plot, results, bool(times))
    return 0


def arrived(args: argparse.Namespace) -> list[Arrival] | None:
    """The arrivals of a turn; None without such options. Raises OSError or ValueError, also for options that exclude
    each other."""
    option = "--trace" if args.trace else "--request-rate" if args.request_rate else None
    if option is None:
        return None
    if args.concurrency:
        raise ValueError(f"{option} says when prompts arrive: it excludes --concurrency")
    if not args.trace:
        return arrivals.gamma(args.num_prompts, args.request_rate, args.burstiness, random(args))
    if args.structured or args.input_tokens:
        other = "--structured" if args.structured else "--input-tokens"
        raise ValueError(f"--trace says how long prompts are: it excludes {other}")
    return arrivals.trace(args.trace, args.num_prompts, args.request_rate)


def prompt_ids(
    tokenizer: Tokenizer, texts: list[str], args: argparse.Namespace, count: int, times: Sequence[Arrival] | None
) -> list[list[int]]:
    """Token ids of `count` prompts, of the trace's lengths if it has any."""
    of_all_turns = argparse.Namespace(**{**vars(args), "num_prompts": count})
    if not any(a.input_tokens for a in times or ()):
        return tokenise(tokenizer, texts, of_all_turns, random(args))
    plain, rng = [tokenizer.encode(text, add_special_tokens=False) for text in texts], random(args)
    lengths = [a.input_tokens or 1 for a in times or ()]
    return [prompts.of_tokens(plain, lengths[i % len(lengths)], int(rng.integers(len(plain)))) for i in range(count)]


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


def judge(contenders: Sequence[Contender], turns: Sequence[Sequence[Turn]], work: Work) -> list[dict[str, Any]]:
    """Results of each contender over its turns; the first contender is the baseline.

    `by_turn`, `medians`, `ratios` and `noise` are by the names of `METRICS`. Ratios are those of the same round:
    geometric mean and 95 % interval; `noise`: whether it includes 1. `mean_accepted_length`: tokens per verification,
    bonus token included. `agreeing_requests`: number of requests with exactly the tokens of the baseline's first turn
    in every turn; with new prompts, of the baseline's same turn, over all turns; None if the prompts' token ids differ.
    """
    results: list[dict[str, Any]] = []
    for contender, measured in zip(contenders, turns, strict=True):
        drafted, accepted, verified = (sum(turn.counts[name] for turn in measured) for name in COUNTERS)
        if work.new:
            pairs = list(zip(turns[0], measured, strict=True))
            same = [a == b for base, turn in pairs for a, b in zip(base.answers, turn.answers, strict=True)]
        else:
            same = [all(turn.answers[i] == a for turn in measured) for i, a in enumerate(turns[0][0].answers)]
        by_turn = {name: [metric.of(turn.report) for turn in measured] for name, metric in METRICS.items()}
        known = {name: [v for v in values if v is not None] for name, values in by_turn.items()}
        ratios = {name: ratio(name, measured, turns[0]) for name in METRICS}
        noise = {name: found and is_noise(found, len(measured)) for name, found in ratios.items()}
        results.append(
            {
                "preset": contender.name, "concurrency": work.level,
                "seconds": [turn.report.duration_s for turn in measured],
                "output_tokens": [turn.report.output_tokens for turn in measured],
                "by_turn": by_turn, "medians": {name: median(v) if v else None for name, v in known.items()},
                "ratios": ratios, "noise": noise,
                "draft_tokens": drafted, "accepted_tokens": accepted, "verifications": verified,
                "acceptance_rate": accepted / drafted if drafted else None,
                "mean_accepted_length": 1 + accepted / verified if verified else None,
                "agreeing_requests": sum(same) if contender.prompts == contenders[0].prompts else None,
            }
        )  # fmt: skip
    return results


def show(results: Sequence[Mapping[str, Any]], requests: int, timed: bool) -> None:
    """Print the speeds, one row per concurrency and preset, with columns on speculation only if something was drafted;
    and the latencies, one table per concurrency. `timed`: requests arrived at given times."""
    speed = "tokens_per_s"
    columns: list[Column] = [
        ("preset", "{}", "preset"), ("median", "{:.1f}", lambda r: r["medians"][speed]),
        ("lowest", "{:.1f}", lambda r: min(r["by_turn"][speed])),
        ("highest", "{:.1f}", lambda r: max(r["by_turn"][speed])), ("ratio", "{}", lambda r: relation(r, speed)),
        ("same", f"{{}}/{requests}", "agreeing_requests"),
    ]  # fmt: skip
    if not timed:
        columns.insert(0, ("at\nonce", "{}", "concurrency"))
    if any(r["draft_tokens"] for r in results):
        columns.append(("accepted", "{:.1%}", "acceptance_rate"))
        columns.append(("mean\nlen.", "{:.2f}", "mean_accepted_length"))
    turns = len(results[0]["seconds"])
    rule = f"ratio to {results[0]['preset']}, with 95 % interval over {turns} turns; ≈: they do not show a difference"
    # The box separates columns by one space. With more, intervals and speculation do not fit into 80 characters.
    style = {"box": SIMPLE_HEAD, "padding": 0, "pad_edge": False, "caption_justify": "left"}
    left = 1 if timed else 2
    table = terminal(results, *columns, left=left, title=METRICS[speed].label, caption=rule, **style)
    table.columns[left - 1].overflow = "fold"
    for column in table.columns[left:]:
        column.no_wrap = True
    Console().print(table)
    for level in dict.fromkeys(r["concurrency"] for r in results):
        own = [r for r in results if r["concurrency"] == level]
        title = "latency in ms, median and ratio" + ("" if timed else f", {level} at once")
        presets = each(r["preset"] for r in own)
        Console().print(terminal(_latencies(own), "", *presets, title=title, **style))


def _latencies(own: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """A row for each latency that was measured, with a cell for each preset."""
    for name, metric in METRICS.items():
        if name != "tokens_per_s" and own[0]["medians"][name] is not None:
            first, *others = (shown(r["medians"][name], metric.form) for r in own)
            ratios = (relation(r, name) for r in own[1:])
            yield [metric.label, first, *(f"{value}  {ratio}" for value, ratio in zip(others, ratios, strict=True))]


def relation(result: Mapping[str, Any], metric: str) -> str:
    """The ratio of a metric to the baseline's, as shown."""
    found = result["ratios"][metric]
    if found is None:
        return UNKNOWN
    mean, low, high = found
    if low == high == 1:
        return "1.000"
    ends = "" if low == high else f" ({low:.2f} … {high:.2f})"
    return f"{'≈' if result['noise'][metric] else ''}{mean:.3f}{ends}"


def draw(path: str, results: Sequence[Mapping[str, Any]], timed: bool) -> None:
    """Plot the speed of every turn by concurrency; with arrivals latencies too. Raises `BenchError`."""
    from jaxspec.bench import plot

    panels: dict[str, dict[str, list[float]]] = {}
    for r in results:
        for name in ["tokens_per_s", *(n for n in METRICS if n.startswith("mean") and timed)]:
            title = METRICS[name].label + ("" if name == "tokens_per_s" else ", ms")
            panels.setdefault(title if timed else f"{r['concurrency']} at a time", {})[r["preset"]] = [
                value for value in r["by_turn"][name] if value is not None
            ]
    plot.turns(path, panels, "" if timed else METRICS["tokens_per_s"].label)
