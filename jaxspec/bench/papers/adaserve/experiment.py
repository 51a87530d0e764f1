"""AdaServe (Li et al. 2025): draft trees selected by SLO, against continuous batching and other draft trees.

Llama-2 on A100 with a drafter of 160 million parameters (§6.1). Requests of three categories, each with its TPOT SLO
(Table 2), arrive as in SplitWise's public trace. "Up to" is the largest gain over the loads (§6.2), here of those at
which the mean time to first token stays within a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.bench import options
from jaxspec.bench.estimates import estimate
from jaxspec.bench.papers import page
from jaxspec.bench.papers.adaserve import cases, engine, report, systems
from jaxspec.bench.papers.adaserve.cases import Case, Data, baseline
from jaxspec.bench.papers.adaserve.gains import curves, gains
from jaxspec.bench.papers.adaserve.requests import ANSWERS, CONTEXT, MIX, capped, read_answers, strict_share
from jaxspec.bench.papers.adaserve.systems import (
    BASELINES,
    BLIND,
    FITTED,
    FORMER,
    KNOWN,
    OURS,
    OUTSIDE,
    PAPER,
    STRATEGIES,
    SYSTEMS,
    TREE_POLICIES,
    UNCALIBRATED,
    UNPACED,
)
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.runs import Result, Runs
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import LLAMA2_A100, step_times
from jaxspec.sched.sim.workload import Lengths, read_lengths

TITLE, headlines = "AdaServe", report.headlines
FILES = {
    "trace": File("traces/azure_llm_2023_conv.csv", "CSV", "column arrival_s: SplitWise's conversation trace"),
    "answers": File(
        "prompts/alpaca_eval.jsonl", "JSONL", "lines with turns, reference_words and other_references of Llama-2-chat"
    ),
    "alpaca": File("prompts/alpaca.jsonl", "JSONL", 'lines of {"turns": [text], "reference": text}'),
    "arxiv": File("lengths/arxiv_summarization.csv", "CSV", "columns input_tokens, output_tokens"),
}  # fmt: skip
SMALL, MIDDLE, LARGE = "llama-2-7b", "llama-2-13b", "llama-2-70b"
#: Requests per second of Fig. 6 (§6.2), and of Fig. 10 with `LARGE`.
FIXED: Mapping[str, float] = {SMALL: 1.9, MIDDLE: 1.9, LARGE: 1.0}
STRICTER_RATE = 1.0
#: A table of answers for short requests: those of the data set instead of Llama-2-chat's.
ALPACA = "alpaca"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: `--quick` does less of the same.

    seeds, fewer: of the main experiments and of the others. rates: of Fig. 4, 5, 7 and 8, up to where every system has
    saturated. shares: of strict requests (Fig. 6); scales: SLOs relative to the baseline latency (Fig. 10); fit:
    chances of the drafter's first candidate that are tried. varied, alpaca: rates with other drafters, the last one
    also with variants of the systems; and with the shorter answers of Alpaca; by model.
    """

    seeds: int
    fewer: int
    rates: Mapping[str, Sequence[float]]
    shares: Sequence[float]
    scales: Sequence[float]
    fit: Sequence[tuple[float, float]]
    varied: Mapping[str, Sequence[float]]
    alpaca: Mapping[str, Sequence[float]]


FULL = Size(
    5, 3, {SMALL: (0.5, 1, 1.9, 3, 5), MIDDLE: (0.5, 1.9, 3, 5), LARGE: (0.5, 1, 2, 3.5, 5)},
    (0.0, 0.5, 1.0), (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    ((0.38, 0.15), (0.4, 0.1), FITTED, (0.42, 0.05), (0.46, 0.15), FORMER),
    {SMALL: (1.9, 3), LARGE: (1, 3.5)}, {SMALL: (5, 8), LARGE: (2, 4)},
)  # fmt: skip
QUICK = Size(
    2, 1, {SMALL: (1.9,), MIDDLE: (1.9,), LARGE: (1, 2)}, (1.0,), (0.8, 0.6), (FITTED,),
    {LARGE: (2,)}, {LARGE: (3,)},
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("load")
    options.add_numbers(data, ("--minutes M", 1.0, "how long requests arrive, in each simulation"))
    engine.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(args, TITLE, FILES, read, simulated, on_engine, report.sections, report.draw)


def read(args: argparse.Namespace) -> tuple[list[arrivals.Arrival], dict[str, Lengths], Lengths]:
    """Arrivals; lengths of short requests by model, and as in Alpaca; lengths of long ones. Raises OSError or
    ValueError."""
    short = {model: capped(read_answers(args.answers, name), CONTEXT) for model, name in ANSWERS.items()}
    short[ALPACA] = capped(read_lengths(args.alpaca), CONTEXT)
    return arrivals.trace(args.arrivals or args.trace), short, capped(read_lengths(args.arxiv), CONTEXT)


def on_engine(
    args: argparse.Namespace, trace: Sequence[arrivals.Arrival], short: Mapping[str, Lengths], long: Lengths
) -> dict[str, Any]:
    """See `engine.on_engine`: the loads are the simulated ones of Fig. 6, half of them, and that of Fig. 10."""

    def load(model: str, rate: float, shares: Sequence[float]) -> float:
        return engine.erlang(rate, (short[model], long, short[model]), shares, baseline(LLAMA2_A100[model]))

    usual, light = load(SMALL, FIXED[SMALL], MIX), load(LARGE, STRICTER_RATE, (1, 0, 0))
    return engine.on_engine(args, trace, short[SMALL], long, (usual / 2, usual), light)


def simulated(
    args: argparse.Namespace, runs: Runs, trace: Sequence[arrivals.Arrival], short: Mapping[str, Lengths], long: Lengths
) -> dict[str, Any]:
    """Run all simulated experiments."""
    size = QUICK if args.quick else FULL
    size = replace(size, seeds=args.seeds, fewer=min(args.seeds, size.fewer)) if args.seeds else size
    variants = Variants.of(args)
    known = {name: preset for name, preset in SYSTEMS.items() if name != KNOWN}
    data = Data(variants.apply(known) | {KNOWN: SYSTEMS[KNOWN]}, short, long, trace, args.minutes)
    grid = _grid(size, args.seed, list(variants.systems))
    found = runs.results("simulations", cases.serve, data, [case for part in grid.values() for case in part])
    steps = [Case(name, SMALL, 0.0, args.seed) for name in (PAPER, OURS)]
    measured = runs.results("selection", cases.breakdown, data, steps)
    return {
        "minutes": args.minutes, "seeds": size.seeds, "fewer": size.fewer, "error": systems.PREDICTION_ERROR,
        "lengths": {
            name: [float(table.input.mean()), float(table.output.mean())]
            for name, table in (*short.items(), ("arxiv", long))
        },
        "baseline_ms": {model: 1e3 * baseline(LLAMA2_A100[model]) for model in ANSWERS},
        "budget": {model: step_times(LLAMA2_A100[model].cost, CONTEXT).verify_budget() for model in ANSWERS},
        "by_rate": {model: curves(grid[model], found, "rate") for model in size.rates},
        "gains": {model: gains(grid[model], found, BASELINES) for model in size.rates},
        "strategies": gains(grid[LARGE], found, STRATEGIES), "trees": gains(grid[SMALL], found, TREE_POLICIES),
        "by_share": {model: curves(grid[f"{model}, shares"], found, "shares") for model in FIXED},
        "stricter": curves(grid["stricter"], found, "scale"), "fit": _fit(grid["fit"], found),
        "variants": {model: curves(grid[f"{model}, variants"], found, "rate") for model in size.varied},
        "assumptions": {
            name: gains(part, found, BASELINES)
            for name, part in grid.items() if name.startswith(("drafter", "answers"))
        },
        "breakdown": {case.system: measured[case] for case in steps},
    }  # fmt: skip


def _grid(size: Size, first: int, own: Sequence[str]) -> dict[str, list[Case]]:
    """The cases of each experiment, by its name; `own`: systems of the user."""
    seeds, fewer = (range(first, first + count) for count in (size.seeds, size.fewer))
    compared = *BASELINES, PAPER, OURS

    def cross(
        names: Sequence[str], model: str, rates: Sequence[float], seeds: Sequence[int], **more: Any
    ) -> list[Case]:
        return [Case(name, model, rate, seed, **more) for name in names for rate in rates for seed in seeds]

    more = {LARGE: STRATEGIES, SMALL: TREE_POLICIES}
    grid = {
        model: cross((*BASELINES, *more.get(model, ()), PAPER, OURS, *own), model, rates, seeds)
        for model, rates in size.rates.items()
    }
    for model, rate in FIXED.items():
        grid[f"{model}, shares"] = [
            case for share in size.shares for case in cross(compared, model, (rate,), fewer, shares=strict_share(share))
        ]
    all_strict = {"shares": (1.0, 0.0, 0.0)}
    grid["stricter"] = [
        case for scale in size.scales
        for case in cross((PAPER, OURS), LARGE, (STRICTER_RATE,), seeds, scale=scale, **all_strict)
    ]  # fmt: skip
    grid["fit"] = [
        case for chance in size.fit for scale in (0.8, 0.6)
        for case in cross((PAPER,), LARGE, (STRICTER_RATE,), seeds, scale=scale, first=chance, **all_strict)
    ]  # fmt: skip
    changed = PAPER, OUTSIDE, UNCALIBRATED, OURS, KNOWN, BLIND, UNPACED
    for model, rates in size.varied.items():
        grid[f"{model}, variants"] = cross(changed, model, rates[-1:], fewer)
        grid[f"drafter with {FORMER[0]}, {report.TITLES[model]}"] = cross(compared, model, rates, fewer, first=FORMER)
    for model, rates in size.alpaca.items():
        grid[f"answers of Alpaca, {report.TITLES[model]}"] = cross(compared, model, rates, fewer, short=ALPACA)
    return grid


def _fit(part: Sequence[Case], found: Mapping[Case, Result]) -> list[dict[str, Any]]:
    """Attainment at 0.8 and 0.6 times the baseline latency, and tokens per verification, by the drafter's quality."""
    rows = []
    for first in dict.fromkeys(case.first for case in part):
        of = {scale: [found[c] for c in part if c.first == first and c.scale == scale] for scale in (0.8, 0.6)}
        row = {str(scale): estimate([one["attainment"] for one in results]) for scale, results in of.items()}
        rows.append({"first": first, **row, "accepted": estimate([one["accepted"] for one in of[0.8]])})
    return rows
