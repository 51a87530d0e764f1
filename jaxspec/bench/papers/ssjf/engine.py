"""SSJF's comparison on the real engine: fewer and shorter jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.estimates import reduction
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import mean_jct, random_jobs, turns
from jaxspec.bench.papers.ssjf.cases import CONCURRENCY
from jaxspec.bench.papers.ssjf.report import FCFS, KNOWN, MODES, NOISY
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import Lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(
        parser.add_argument_group("with --engine"),
        ("--engine-jobs N", 50, "requests per turn"),
        ("--engine-scale X", 0.2, "factor on the lengths"),
        ("--engine-rate R", 20.0, "requests/s"),
    )


def measure(args: argparse.Namespace, output: np.ndarray, orders: Mapping[str, Preset], sigma: float) -> dict[str, Any]:
    """Reductions of the mean JCT in per cent with their intervals over the turns, `{mode: {order: estimate}}`.

    output: the answers' lengths `[rows]`, which are scaled; sigma: log-normal error of the predictions. Raises
    `BenchError`.
    """
    given, repeats, jobs = overrides(args), args.repeats or 5, args.engine_jobs
    short = np.maximum(1, np.round(args.engine_scale * output)).astype(int)
    table = Lengths(np.full(short.shape, 32), short, np.full(short.shape, np.nan))
    results: dict[str, Any] = {}
    with progress("turns", len(MODES) * 3 * (repeats + 1)) as advance:
        for mode in MODES:
            seats = 1 if mode == "none" else CONCURRENCY
            limits = {"batching": mode, "max_num_seqs": seats, "max_batch_size": seats, "draft": []} | given
            noisy = orders[NOISY].but(predictor="noisy_oracle", predictor_noise=sigma)
            compared = {FCFS: orders[FCFS], NOISY: noisy, KNOWN: orders[KNOWN]}
            with engines({name: order.but(**limits) for name, order in compared.items()}, args.model) as loaded:
                work = random_jobs(loaded, table, jobs, args.engine_rate, args.seed)
                measured = turns(loaded, work, repeats, advance)
            jct = {name: [mean_jct(turn) for turn in metrics] for name, metrics in measured.items()}
            results[mode] = {name: reduction(jct[name], jct[FCFS]) for name in (NOISY, KNOWN)}
    return {
        "jobs": jobs, "turns": repeats, "scale": args.engine_scale, "rate": args.engine_rate, "reduction": results,
    }  # fmt: skip
