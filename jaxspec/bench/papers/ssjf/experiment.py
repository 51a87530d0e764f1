"""SSJF (Qiu et al. 2024): shortest predicted job first against FCFS with no, dynamic and continuous batching.

The figures' loads are those of the paper's published experiments (github.com/James-QiuHaoran/
LLM-serving-with-proxy-models, model-serving/auto_eval*.py, util.py): 50 jobs, 20 repetitions, Poisson arrivals at 1, 3,
5, 7 and 9 jobs/s, or Gamma gaps of mean 1/0.03 s with a coefficient of variation of 1 to 5. Improvements are those of
the means over a figure's loads; throughput is measured until a quarter of the jobs are done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.estimates import Estimate, estimate, ratio, reduction
from jaxspec.bench.papers import page
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.runs import Result, Runs
from jaxspec.bench.papers.ssjf import cases, engine, report
from jaxspec.bench.papers.ssjf.cases import CONCURRENCY, CV, LONG_WAIT, RANDOM_CV, RATE, TRACE, Case, Data, Knee
from jaxspec.bench.papers.ssjf.predictor_report import ssjf_table_2
from jaxspec.bench.papers.ssjf.report import CLASSES, FCFS, KNOWN, MODES, NOISY
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.cost import V100_QUERY_MS
from jaxspec.sched.sim.workload import Lengths, class_accuracy, noise_of_accuracy, noisy, read_lengths

TITLE, headlines = "SSJF", report.headlines
FILES = {
    "lengths": File(
        "lengths/ssjf_vicuna13b_predictions.csv", "CSV", "columns output_tokens, pred_class3, pred_class5"
    ),
    "conversations": File("prompts/multi_turn.jsonl", "JSONL", "conversations with the list replies (Fig. 9)"),
    "functions": File("traces/azure_functions_2021_sample.csv", "CSV", "column arrival_s: Azure's functions trace"),
}  # fmt: skip
#: Seeds of the main figures, as in the published experiments; other experiments take a quarter of them.
SEEDS, QUICK = 20, 2
RATES: Sequence[float] = (1, 3, 5, 7, 9)
CVS: Sequence[float] = (1, 2, 3, 4, 5)
SIZES = (2, 4, 6, 8, 10)
#: Jobs of a run in steady state, and the mean JCT in seconds that ends the search for a knee.
MANY, LIMIT = 300, 60.0
#: Bounds of the five length classes in the published code (single round), and the paper's predictor accuracy (§4.3).
BOUNDS, ACCURACY = (58, 147, 280, 499), 0.615
#: Fig. 9: the paper's accuracy in the first round and the second; it lies between the two in rounds 3 to 5.
ROUND_ACCURACY = (0.619, 0.60, 0.61, 0.61, 0.61)
#: The workload has the predictions of both SSJFs.
ORDERS: Mapping[str, Preset] = {
    FCFS: Preset("fcfs"),
    CLASSES: Preset("ssjf").but(predictor="none"),
    NOISY: Preset("ssjf").but(predictor="none"),
    KNOWN: Preset("sjf_oracle"),
}
BINARY, AGING = "binary classes", "aging"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""

    def all_sections(kept: Mapping[str, Any]) -> dict[str, str]:
        return report.sections(kept) | trained(Path(args.out) / "predictor.json")

    page.run(args, TITLE, FILES, read, simulated, on_engine, all_sections, report.draw)


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths], list[np.ndarray]]:
    """Lengths with the predictions of five classes and of three; reply lengths of Fig. 9's rounds.

    Raises OSError or ValueError.
    """
    tables = {name: read_lengths(args.lengths, name) for name in ("pred_class5", "pred_class3")}
    return tables, cases.read_rounds(args.conversations, len(ROUND_ACCURACY))


def trained(path: Path) -> dict[str, str]:
    """Table 2 for this project's predictors, if `bench predictor` has kept its numbers. Raises `BenchError`."""
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} does not hold the numbers of `bench predictor`: {error}") from None
    return {"table 2, trained here": ssjf_table_2(kept)}


def on_engine(args: argparse.Namespace, lengths: Mapping[str, Lengths], _: Any) -> dict[str, Any]:
    """See `engine.measure`: predictions with the noise that gives the paper's accuracy."""
    output = lengths["pred_class5"].output
    sigma = noise_of_accuracy(output, ACCURACY, BOUNDS, np.random.default_rng(args.seed))
    return engine.measure(args, output, ORDERS, sigma)


def predictors(
    lengths: Mapping[str, Lengths], rounds: Sequence[np.ndarray], rng: np.random.Generator
) -> dict[str, Lengths]:
    """The tables of lengths and predictions by name: of each order, and with its round appended those of Fig. 9.

    The paper's regression predictions are not published. Lengths with a log-normal error that has the same five-class
    accuracy stand in for them.
    """
    five = lengths["pred_class5"]
    found = {CLASSES: five, BINARY: lengths["pred_class3"]} | _noisy_and_known(five.output, ACCURACY, rng)
    for number, (output, accuracy) in enumerate(zip(rounds, ROUND_ACCURACY, strict=True), 1):
        found |= {f"{name} {number}": table for name, table in _noisy_and_known(output, accuracy, rng).items()}
    return found


def _noisy_and_known(output: np.ndarray, accuracy: float, rng: np.random.Generator) -> dict[str, Lengths]:
    sigma = noise_of_accuracy(output, accuracy, BOUNDS, rng)
    known = Lengths(np.zeros(len(output), int), output, np.full(len(output), np.nan))
    return {NOISY: replace(known, predicted=noisy(output, sigma, rng)), KNOWN: known, FCFS: known}


def simulated(
    args: argparse.Namespace, runs: Runs, lengths: Mapping[str, Lengths], rounds: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Run all simulated experiments: estimates over the seeds, relative to FCFS with the same jobs."""
    seeds = range(args.seed, args.seed + (args.seeds or (QUICK if args.quick else SEEDS)))
    variants = Variants.of(args)
    systems = variants.apply({**ORDERS, AGING: ORDERS[CLASSES].but(aging_ms=100_000.0)})
    if variants.predictor:
        systems[f"SSJF, {args.predictor}"] = Preset("ssjf").but(**variants.predictor)
    orders = [name for name in systems if name != AGING]
    data = Data(systems, predictors(lengths, rounds, np.random.default_rng(args.seed)), args.functions, variants)
    grid = _grid(seeds, orders, args.quick)
    found = runs.results("simulations", cases.serve, data, [case for part in grid.values() for case in part])
    searches = {
        (mode, seats): [
            Knee(Case(order, _table(order), RATE, 0.2 * seats, mode, seed, seats, MANY), LIMIT)
            for order in orders for seed in _fewer(seeds)
        ]
        for mode, seats in (("none", 1), ("dynamic", CONCURRENCY), ("continuous", CONCURRENCY))
    }  # fmt: skip
    knees = runs.results("knees", cases.find_knee, data, [task for part in searches.values() for task in part])
    accuracy = {n: class_accuracy(data.tables[n].predicted, data.tables[n].output, BOUNDS) for n in (CLASSES, NOISY)}
    return {
        "seeds": len(seeds), "accuracy": accuracy, "figures": {key: summary(part, found) for key, part in grid.items()},
        "curves": {f"{load}, {mode}": curves(grid[f"{load}, {mode}"], found) for load in (RATE, CV) for mode in MODES},
        "knees": {
            mode: {
                order: estimate([knees[task]["rate"] for task in part if task.case.order == order])
                for order in orders
            }
            for (mode, _), part in searches.items()
        },
    }  # fmt: skip


def _table(order: str) -> str:
    """The table of lengths and predictions of an order, by default one without predictions."""
    return order if order in ORDERS else CLASSES if order == AGING else FCFS


def _fewer(seeds: Sequence[int]) -> Sequence[int]:
    """A quarter of the seeds, but two at least."""
    return seeds[: max(2, len(seeds) // 4)]


def _grid(seeds: Sequence[int], orders: Sequence[str], quick: bool) -> dict[str, list[Case]]:
    """The cases of each experiment, by its name; `quick`: every other load and batch size, two of Table 1's models."""
    step = 2 if quick else 1
    rates, cvs, sizes, models = RATES[::step], CVS[::step], SIZES[::step], [*V100_QUERY_MS][: 2 if quick else None]
    loads = {RATE: rates, CV: cvs, RANDOM_CV: cvs, TRACE: rates}
    fewer = _fewer(seeds)

    def cross(
        load: str, mode: str, names: Iterable[str] = orders, tables: Mapping[str, str] | None = None,
        seeds: Sequence[int] = fewer, **more: Any,
    ) -> list[Case]:  # fmt: skip
        return [
            Case(name, (tables or {}).get(name) or _table(name), load, x, mode, seed, **more)
            for name in names for x in loads[load] for seed in seeds
        ]  # fmt: skip

    grid = {f"{load}, {mode}": cross(load, mode, seeds=seeds) for load in (RATE, CV) for mode in MODES}
    grid |= {f"{load}, {mode}": cross(load, mode) for load in (RANDOM_CV, TRACE) for mode in MODES}
    grid |= {f"{load}, continuous, 2 seats": cross(load, "continuous", seeds=seeds, seats=2) for load in (RATE, CV)}
    grid["rate, continuous, 200 jobs"] = cross(RATE, "continuous", jobs=200)
    for mode in ("dynamic", "continuous"):
        grid |= {f"{mode}, {size}": cross(RATE, mode, (FCFS, CLASSES), seats=size) for size in sizes}
    grid |= {f"{load}, dynamic, 10 s": cross(load, "dynamic", wait=LONG_WAIT) for load in (RATE, CV)}
    grid[BINARY] = cross(RATE, "none", (FCFS, CLASSES), {CLASSES: BINARY})
    grid[AGING] = cross(RATE, "none", (FCFS, AGING))
    for number in range(1, len(ROUND_ACCURACY) + 1):
        names = FCFS, NOISY, KNOWN
        grid[f"round {number}"] = cross(RATE, "none", names, {name: f"{name} {number}" for name in names})
    grid |= {f"model {model}": cross(RATE, "none", model=model) for model in models}
    return grid


def summary(part: Sequence[Case], found: Mapping[Case, Result]) -> dict[str, dict[str, Estimate | None]]:
    """`{order: {jct, ttft: reduction in per cent; quarter: throughput ratio}}` of an experiment, relative to FCFS.

    A seed's gain is that of the means over the loads, as in the paper.
    """
    means = {
        (order, metric): _by_seed(part, found, order, metric)
        for order in dict.fromkeys(case.order for case in part) for metric in ("jct", "ttft", "quarter", "throughput")
    }  # fmt: skip
    out: dict[str, dict[str, Estimate | None]] = {}
    for order in dict.fromkeys(case.order for case in part if case.order != FCFS):
        out[order] = {name: reduction(means[order, name], means[FCFS, name]) for name in ("jct", "ttft")}
        for name in ("quarter", "throughput"):
            out[order][name] = ratio(means[order, name], means[FCFS, name])
    return out


def _by_seed(part: Sequence[Case], found: Mapping[Case, Result], order: str, metric: str) -> list[float]:
    """Each seed's mean over the loads."""
    values: dict[int, list[float]] = {}
    for case in part:
        if case.order == order:
            values.setdefault(case.seed, []).append(found[case][metric])
    return [float(np.mean(v)) for v in values.values()]


def curves(part: Sequence[Case], found: Mapping[Case, Result]) -> dict[str, dict[str, dict[str, Estimate | None]]]:
    """`{metric: {order: {load: estimate}}}` of an experiment."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for metric in ("jct", "quarter"):
        for case in part:
            of_order = values.setdefault(metric, {}).setdefault(case.order, {})
            of_order.setdefault(f"{case.x:g}", []).append(found[case][metric])
    return {
        metric: {order: {x: estimate(v) for x, v in points.items()} for order, points in orders.items()}
        for metric, orders in values.items()
    }
