"""SSJF (Qiu et al. 2024): shortest predicted job first against FCFS with no, dynamic and continuous batching.

The figures' loads are those of the paper's published experiments (github.com/James-QiuHaoran/
LLM-serving-with-proxy-models, model-serving/auto_eval*.py, util.py): 50 jobs, 20 repetitions, Poisson arrivals at 1, 3,
5, 7 and 9 jobs/s, or Gamma gaps of mean 1/0.03 s with a coefficient of variation of 1 to 5. Improvements are those of
the means over a figure's loads; throughput is measured until a quarter of the jobs are done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import mean_jct, random_jobs, simulate, turns
from jaxspec.bench.papers.ssjf.predictor_report import ssjf_table_2
from jaxspec.bench.papers.ssjf.report import CLASSES, FCFS, KNOWN, MODES, NOISY, Curve, draw, sections
from jaxspec.progress import progress
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import SSJF
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, class_accuracy, join, noise_of_accuracy, noisy, read_lengths

JOBS, MORE_JOBS, REPEATS, CONCURRENCY = 50, 200, 20, 4
RATES: Sequence[float] = (1, 3, 5, 7, 9)
CVS: Sequence[float] = (1, 2, 3, 4, 5)
CV_RATE = 0.03
SIZES = (2, 4, 6, 8, 10)
#: Bounds of the five length classes in the published code (single round), and the paper's predictor accuracy (§4.3).
BOUNDS, ACCURACY = (58, 147, 280, 499), 0.615
#: Milliseconds that a batch waits to fill. The paper gives none; in the published code SJF never waits, and FCFS up to
#: 10 s. Here all orders wait equally long.
SHORT_WAIT, LONG_WAIT = 50.0, 10_000.0
#: The workload has the predictions of both SSJFs.
ORDERS: Mapping[str, Preset] = {
    FCFS: Preset("fcfs"),
    CLASSES: Preset("ssjf").but(predictor="none"),
    NOISY: Preset("ssjf").but(predictor="none"),
    KNOWN: Preset("sjf_oracle"),
}
Arrive = Callable[[float, np.random.Generator], list[arrivals.Arrival]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--lengths", required=True, metavar="CSV", help="columns output_tokens, pred_class3, pred_class5")
    options.add_numbers(
        parser.add_argument_group("with --engine"),
        ("--engine-jobs N", 24, "requests per turn"),
        ("--engine-scale X", 0.2, "factor on the lengths"),
        ("--engine-rate R", 20.0, "requests/s"),
    )


def run(args: argparse.Namespace) -> int:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""

    def all_sections(kept: Mapping[str, Any]) -> dict[str, str]:
        return sections(kept) | trained(Path(args.out) / "predictor.json")

    return page.run(args, "SSJF", read, simulated, on_engine, all_sections, draw)


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths]]:
    """Lengths with the predictions of five classes and of three. Raises OSError or ValueError."""
    return ({name: read_lengths(args.lengths, name) for name in ("pred_class5", "pred_class3")},)


def trained(path: Path) -> dict[str, str]:
    """Table 2 for this project's predictors, if `bench predictor` has kept its numbers. Raises `BenchError`."""
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} does not hold the numbers of `bench predictor`: {error}") from None
    return {"table 2, trained here": ssjf_table_2(kept)}


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(args: argparse.Namespace, lengths: Mapping[str, Lengths]) -> dict[str, Any]:
    """Run all simulated experiments."""
    repeats, tables = args.repeats or REPEATS, predictors(lengths, np.random.default_rng(args.seed))
    loads: dict[str, tuple[Arrive, Sequence[float]]] = {
        "rate": (lambda rate, rng: arrivals.poisson(JOBS, rate, rng), RATES),
        "rate, more jobs": (lambda rate, rng: arrivals.poisson(MORE_JOBS, rate, rng), RATES),
        "cv": (sorted_gaps, CVS),
        "cv, in random order": (lambda cv, rng: arrivals.gamma(JOBS, CV_RATE, cv, rng), CVS),
    }
    more = [("rate, more jobs", "continuous"), *(("cv, in random order", mode) for mode in MODES)]
    wanted = [(load, mode) for load in ("rate", "cv") for mode in MODES] + more
    names = list(ORDERS)
    with progress("experiments", len(wanted) + 2 * len(SIZES) + 4) as advance:

        def figure(
            load: str, mode: str, concurrency: int = CONCURRENCY, orders: Sequence[str] = names, **more: Any
        ) -> dict[str, Curve]:
            arrive, xs = loads[load]
            concurrency = 1 if mode == "none" else concurrency
            presets = {order: ORDERS[order].but(**more) for order in orders}
            found = {
                name: curve(order, arrive, xs, mode, concurrency, tables[name], repeats, args.seed)
                for name, order in presets.items()
            }
            advance()
            return found

        figures: dict[str, dict[str, dict[str, Curve]]] = {}
        for load, mode in wanted:
            figures.setdefault(load, {})[mode] = figure(load, mode)
        sizes = {
            mode: {str(n): figure("rate", mode, n, (FCFS, CLASSES)) for n in SIZES}
            for mode in ("dynamic", "continuous")
        }
        patient = {load: figure(load, "dynamic", batch_wait_timeout_ms=LONG_WAIT) for load in ("rate", "cv")}
        extra = {}
        for name, policy, table in (
            ("binary classes", ORDERS[CLASSES], lengths["pred_class3"]),
            ("aging", ORDERS[CLASSES].but(aging_ms=100_000.0), tables[CLASSES]),
        ):
            extra[name] = curve(policy, *loads["rate"], "none", 1, table, repeats, args.seed)
            advance()
    accuracy = {order: class_accuracy(t.predicted, t.output, BOUNDS) for order, t in tables.items() if "SSJF" in order}
    return {
        "jobs": (JOBS, MORE_JOBS), "repeats": repeats, "figures": figures, "sizes": sizes, "patient": patient,
        "extra": extra, "accuracy": accuracy,
    }  # fmt: skip


def sorted_gaps(cv: float, rng: np.random.Generator) -> list[arrivals.Arrival]:
    """Arrivals with ascending Gamma gaps, as in the published code: nearly all jobs arrive at once."""
    times = [a.time for a in arrivals.gamma(JOBS + 1, CV_RATE, cv, rng)]
    return [arrivals.Arrival(float(t)) for t in np.cumsum(np.sort(np.diff(times)))]


def curve(
    order: Preset, arrive: Arrive, xs: Sequence[float], mode: str, concurrency: int, table: Lengths, repeats: int,
    seed: int,
) -> Curve:  # fmt: skip
    """Mean over `repeats` for each load of `xs`; every order and mode gets the same jobs at the same times."""
    policy = order.load(batching=mode, max_batch_size=concurrency, batch_wait_timeout_ms=SHORT_WAIT).policy
    points: Curve = {}
    for i, x in enumerate(xs):
        found = []
        for repeat in range(repeats):
            rng = np.random.default_rng([seed, i, repeat])
            served = simulate(policy, concurrency, join(arrive(x, rng), table, 32, rng), SSJF)
            if mode == "dynamic":
                served = returned_together(served)
            found.append((float(served.jct.mean()), served.throughput_at(0.25)))
        jct, throughput = np.mean(found, axis=0).tolist()
        points[str(x)] = (jct, throughput)
    return points


def returned_together(served: Served) -> Served:
    """Requests that start together return together, when the last one is done (dynamic batching, Fig. 3)."""
    _, batch = np.unique(served.first_scheduled, return_inverse=True)
    ends = np.zeros(batch.max() + 1)
    np.maximum.at(ends, batch, served.finished)
    return served.ending(ends[batch])


def predictors(lengths: Mapping[str, Lengths], rng: np.random.Generator) -> dict[str, Lengths]:
    """The lengths with each order's predictions.

    The paper's regression predictions are not published. Lengths with a log-normal error that has the same five-class
    accuracy stand in for them.
    """
    five = lengths["pred_class5"]
    sigma = noise_of_accuracy(five.output, ACCURACY, BOUNDS, rng)
    unknown = np.full(five.output.shape, np.nan)
    tables = {FCFS: unknown, CLASSES: five.predicted, NOISY: noisy(five.output, sigma, rng), KNOWN: unknown}
    return {order: Lengths(five.input, five.output, predicted) for order, predicted in tables.items()}


# --- on the engine ----------------------------------------------------------------------------------------------------


def on_engine(args: argparse.Namespace, lengths: Mapping[str, Lengths]) -> dict[str, Any]:
    """JCT reductions of each turn in per cent, `{mode: {order: [turns]}}`, with fewer and shorter jobs.

    Predictions come from the engine's noisy oracle, with the noise that gives the paper's accuracy. Raises
    `BenchError`.
    """
    given, repeats, jobs = overrides(args), args.repeats or 5, args.engine_jobs
    output = lengths["pred_class5"].output
    sigma = noise_of_accuracy(output, ACCURACY, BOUNDS, np.random.default_rng(args.seed))
    short = np.maximum(1, np.round(args.engine_scale * output)).astype(int)
    table = Lengths(np.full(short.shape, 32), short, np.full(short.shape, np.nan))
    results: dict[str, Any] = {}
    with progress("turns", len(MODES) * len(ORDERS) * (repeats + 1)) as advance:
        for mode in MODES:
            concurrency = 1 if mode == "none" else CONCURRENCY
            limits = {"batching": mode, "max_num_seqs": concurrency, "max_batch_size": concurrency, "draft": []} | given
            noisy = ORDERS[NOISY].but(predictor="noisy_oracle", predictor_noise=sigma)
            orders = {FCFS: ORDERS[FCFS], NOISY: noisy, KNOWN: ORDERS[KNOWN]}
            presets = {name: order.but(**limits) for name, order in orders.items()}
            with engines(presets, args.model) as loaded:
                work = random_jobs(loaded, table, jobs, args.engine_rate, args.seed)
                measured = turns(loaded, work, repeats, advance)
            jct = {name: [mean_jct(turn) for turn in metrics] for name, metrics in measured.items()}
            results[mode] = {
                name: [100 * (1 - value / base) for value, base in zip(jct[name], jct[FCFS], strict=True)]
                for name in (NOISY, KNOWN)
            }
    return {"jobs": jobs, "scale": args.engine_scale, "rate": args.engine_rate, "reduction": results}
