"""LAPS-SD (Li et al. 2025): speculative decoding ordered by attained service, then by estimated execution time.

Requests are served one at a time (§3) by LLaMA-7B with LLaMA-68M on an L20 (§5.1), and arrive at once or as a Poisson
process. Chains of 8 drafts as in SpecInfer, whose setup the paper follows. Output lengths are those of the prompt
files' answers, at four characters per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from jaxspec.bench import prompts
from jaxspec.bench.estimates import estimate
from jaxspec.bench.papers import page
from jaxspec.bench.papers.laps_sd import cases, engine, figures, grids, perception, report
from jaxspec.bench.papers.laps_sd.cases import CHAT, PROCESSES, Case, Data, Knee
from jaxspec.bench.papers.laps_sd.grids import ANSWERS
from jaxspec.bench.papers.laps_sd.perception import Estimation
from jaxspec.bench.papers.laps_sd.report import KNOWN, LAPS_SD, LATE, STABILITY
from jaxspec.bench.papers.laps_sd.summaries import best_queues, overall, summary
from jaxspec.bench.papers.laps_sd.systems import AGAINST, BLIND, SYSTEMS
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.runs import Runs
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.acceptance import Sampled
from jaxspec.sched.sim.workload import Lengths, read_lengths

TITLE, headlines = "LAPS-SD", report.headlines
FILES = {
    "chat": File("prompts/alpaca_gpt4.jsonl", "JSONL", "stand-in for Chatbot Instruction Prompts"),
    "code": File("prompts/mbpp.jsonl", "JSONL", "MBPP"),
    "math": File("prompts/math500.jsonl", "JSONL", "stand-in for MiniThinky"),
    ANSWERS: File("lengths/ssjf_vicuna13b_predictions.csv", "CSV", "columns output_tokens, pred_class5"),
}
#: Seeds of Fig. 5; the other experiments take half of them.
SEEDS, QUICK = 20, 4
#: Fig. 3: the number of requests, and points in output tokens.
SETTLING, POINTS = 400, (20, 50, 100, 150, 200, 300)
#: Requests of an estimate of Fig. 7 and of a knee, which is at this many mean execution times.
ALONE, MANY, LIMIT = 300, 150, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(args, TITLE, FILES, read, simulated, on_engine, report.sections, figures.draw)


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths], dict[str, list[str]]]:
    """Lengths and prompts by data set. Raises OSError or ValueError."""
    tables = {name: read_lengths(getattr(args, name)) for name in PROCESSES}
    tables[ANSWERS] = read_lengths(args.answers, "pred_class5")
    return tables, {name: prompts.load(getattr(args, name)) for name in PROCESSES}


def on_engine(args: argparse.Namespace, _: Any, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """See `engine.measure`."""
    return engine.measure(args, {name: preset for name, preset in SYSTEMS.items() if name not in (LATE, KNOWN)}, texts)


def simulated(args: argparse.Namespace, runs: Runs, tables: Mapping[str, Lengths], _: Any) -> dict[str, Any]:
    """Run all simulated experiments: estimates over the seeds, relative to LP-SJF and LAS with the same requests."""
    seeds = range(args.seed, args.seed + (args.seeds or (QUICK if args.quick else SEEDS)))
    fewer = seeds[: max(2, len(seeds) // 2)]
    variants = Variants.of(args)
    systems = variants.apply(SYSTEMS)
    own = [*SYSTEMS, *variants.systems]
    fixed = {f"{n} tokens": _all(tables["chat"], n) for n in grids.SWITCHED}
    data = Data(systems, {**tables, **fixed}, variants)
    figure_5 = {
        (name, str(n)): cases.cases(own, seeds, name, BLIND, count=n, process=PROCESSES[name])
        for name in PROCESSES for n in grids.thin(grids.COUNTS, args.quick)
    }  # fmt: skip
    grid = grids.map_of(fewer, args.quick)
    others = {
        "loads": grids.loads(fewer, [*AGAINST, *variants.systems], args.quick),
        "variations": grids.variations(fewer, args.quick), "measured": grids.measured(fewer, args.quick),
        "switching": grids.switching(seeds[:1], args.quick), "queues": grids.queues(fewer, args.quick),
    }  # fmt: skip
    every = [*figure_5.values(), *grid.values(), *(part for parts in others.values() for part in parts.values())]
    found = runs.results("simulations", cases.serve, data, [case for part in every for case in part])
    searches = {
        system: [Knee(Case(system, "chat", seed, MANY, process=grids.MIDDLE["process"]), LIMIT) for seed in fewer]
        for system in own
    }
    knees = runs.results("knees", cases.find_knee, data, [task for part in searches.values() for task in part])
    return {
        "seeds": len(seeds), "fewer": len(fewer),
        "counts": {name: {n: summary(part, found) for (other, n), part in figure_5.items() if other == name}
                   for name in PROCESSES},
        "overall": overall(list(figure_5.values()), found),
        "map": {" | ".join(key): summary(part, found, brief=True, metrics=("jct",)) for key, part in grid.items()},
        "loads": {name: summary(part, found) for name, part in others["loads"].items()},
        "variations": {name: summary(part, found, brief=True) for name, part in others["variations"].items()},
        "measured": {name: summary(part, found, brief=True) for name, part in others["measured"].items()},
        "switching": {name: estimate([found[case]["switching"] for case in part])
                      for name, part in others["switching"].items()},
        "queues": best_queues(others["queues"], found),
        "errors": errors(runs, data, fewer), "settling": settling(args.seed),
        "knees": {system: estimate([knees[task]["load"] for task in part]) for system, part in searches.items()},
    }  # fmt: skip


def _all(table: Lengths, tokens: int) -> Lengths:
    return replace(table, output=np.full(len(table), tokens))


def errors(runs: Runs, data: Data, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Fig. 7 by `data | γ, δ | estimator`: the published one, also with predicted lengths, and with shrinkage."""
    tasks: dict[str, list[Estimation]] = {}
    for name, (gamma, delta), (estimator, sigma) in product(PROCESSES, STABILITY, report.ESTIMATORS.items()):
        laps = ("window", gamma), ("tolerance", delta), ("shrinkage", estimator == report.WITH_SHRINKAGE)
        tasks[report.estimation_key(name, gamma, delta, estimator)] = [
            Estimation(Case(LAPS_SD, name, seed, ALONE, sigma=sigma, process=PROCESSES[name], laps=laps))
            for seed in seeds
        ]
    done = runs.results("estimates", perception.estimation, data, [task for part in tasks.values() for task in part])

    def mean(part: Sequence[Estimation], metric: str) -> Any:
        return estimate([done[task][metric] for task in part])

    return {
        key: {metric: mean(part, metric) for metric in ("error", "bias", "perceived", "stable_after")}
        | {"by_length": {name: estimate([done[task]["by_length"].get(name) for task in part]) for name in
                         dict.fromkeys(name for task in part for name in done[task]["by_length"])}}
        for key, part in tasks.items()
    }  # fmt: skip


def settling(seed: int) -> dict[str, Any]:
    """Fig. 3: acceptance rates of three requests, and the mean distance of 400 from their last rates."""
    sampled = Sampled(CHAT, 3, np.random.default_rng(seed))
    return {
        "curves": {f"request {i + 1}": perception.rate_curve(sampled, i, POINTS[-1]) for i in range(3)},
        "distance": perception.settling(CHAT, SETTLING, POINTS, seed),
    }
