"""SSJF (Qiu et al. 2024): shortest predicted job first against FCFS, without, with dynamic and with continuous batching.

The figures' loads are those of the paper's published experiments (github.com/James-QiuHaoran/
LLM-serving-with-proxy-models, model-serving/auto_eval*.py, util.py): 50 jobs, 20 repetitions, Poisson arrivals at 1, 3,
5, 7 and 9 a second, or Gamma gaps of mean 1/0.03 s whose coefficient of variation is 1 to 5; improvements are of the
means over a figure's loads; throughput is counted until a quarter of the jobs are done.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import options, plot
from jaxspec.bench.errors import BenchError
from jaxspec.bench.papers import page
from jaxspec.bench.papers.serve import engines, mean_jct, prompt_ids, simulate, turns
from jaxspec.sched import arrivals
from jaxspec.sched.cost import SSJF
from jaxspec.sched.policy import PolicyConfig
from jaxspec.sched.simulator import Served
from jaxspec.sched.workload import Lengths, Workload, class_accuracy, join, noise_of_accuracy, noisy, read_lengths

JOBS, REPEATS, SEATS = 50, 20, 4
RATES: Sequence[float] = (1, 3, 5, 7, 9)
CVS: Sequence[float] = (1, 2, 3, 4, 5)
CV_RATE = 0.03
SIZES = (2, 4, 6, 8, 10)
#: Bounds of the five length classes in the published code (single round), and §4.3's accuracy of the paper's predictor.
BOUNDS, ACCURACY = (58, 147, 280, 499), 0.615
#: BATCH_WAIT_TIMEOUT of the published code, in seconds.
TIMEOUT = 10.0
MODES = ("none", "dynamic", "continuous")
FCFS, PREDICTED, KNOWN = "FCFS", "SSJF", "SJF, lengths known"
ORDERS: Mapping[str, Mapping[str, Any]] = {
    FCFS: {"order": "fcfs"},
    PREDICTED: {"order": "sjf"},
    KNOWN: {"order": "sjf", "predictor": "oracle"},
}
#: §4.2: reduction of the mean JCT in per cent, and throughput as a multiple of FCFS's; (SSJF, lengths known).
PAPER_JCT = {
    "rate": {"none": (34.5, 43.7), "dynamic": (39.6, 58.2), "continuous": (33.2, 43.0)},
    "cv": {"none": (30.5, 37.6), "dynamic": (39.0, 52.9), "continuous": (35.0, 41.5)},
}
PAPER_THROUGHPUT = {
    "rate": {"none": (3.6, 4.7), "dynamic": (3.0, 4.1), "continuous": (2.8, 3.2)},
    "cv": {"none": (2.6, 3.4), "dynamic": (2.6, 3.8), "continuous": (2.2, 2.7)},
}
#: Table 2: (accuracy, JCT reduction in per cent, throughput).
PAPER_TABLE_2 = {
    "binary classes": (None, 30.8, 1.59), "classes": (0.592, 35.8, 1.98), "regression (L1)": (0.615, 39.1, 2.21),
}  # fmt: skip

#: Mean JCT in seconds and throughput in jobs a second, of each load and order: figures[mode][order][load].
Curve = dict[str, tuple[float, float]]
Arrive = Callable[[float, np.random.Generator], list[arrivals.Arrival]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--lengths", required=True, metavar="CSV", help="output_tokens, pred_class3, pred_class5")
    data.add_argument("--engine-jobs", type=options.count, default=24, metavar="N", help="of --engine (default: 24)")
    data.add_argument(
        "--engine-scale", type=options.positive, default=0.2, metavar="X", help="of --engine: of the lengths (0.2)"
    )
    data.add_argument(
        "--engine-rate", type=options.positive, default=20.0, metavar="R", help="of --engine: requests a second (20)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where the data cannot be read or nothing can be run."""
    out = Path(args.out)
    try:
        lengths = {name: read_lengths(args.lengths, name) for name in ("pred_class5", "pred_class3")}
    except (OSError, ValueError) as error:
        raise BenchError(str(error)) from None
    if args.engine:
        kind, numbers = "engine", on_engine(args, lengths["pred_class5"])
    else:
        kind, numbers = "simulated", simulated(args, lengths)
    kept = page.keep(out / "ssjf.json", kind, numbers, args.json)
    page.write(out / "ssjf.md", "SSJF", sections(kept))
    if kind == "simulated":
        draw(out, kept["simulated"])
    return 0


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(args: argparse.Namespace, lengths: Mapping[str, Lengths]) -> dict[str, Any]:
    repeats, classes = args.repeats or REPEATS, lengths["pred_class5"]
    loads: dict[str, tuple[Arrive, Sequence[float]]] = {
        "rate": (lambda rate, rng: arrivals.poisson(JOBS, rate, rng), RATES),
        "cv": (sorted_gaps, CVS),
        "cv, in random order": (lambda cv, rng: arrivals.gamma(JOBS, CV_RATE, cv, rng), CVS),
    }
    predictors = table_2_predictors(lengths, np.random.default_rng(args.seed))
    total = len(loads) * len(MODES) + len(SIZES) * 2 + len(predictors) + 1
    with options.progress("experiments", total) as advance:

        def figure(arrive: Arrive, xs: Sequence[float], mode: str, seats: int, table: Lengths) -> dict[str, Curve]:
            advance()
            return {order: curve(ORDERS[order], arrive, xs, mode, seats, table, repeats, args.seed) for order in ORDERS}

        by_rate, rates = loads["rate"]
        figures = {
            name: {mode: figure(arrive, xs, mode, SEATS if mode != "none" else 1, classes) for mode in MODES}
            for name, (arrive, xs) in loads.items()
        }
        sizes = {
            mode: {str(n): figure(by_rate, rates, mode, n, classes) for n in SIZES} for mode in ("dynamic", "continuous")
        }
        table_2 = {
            name: {"accuracy": accuracy, **figure(by_rate, rates, "none", 1, table)}
            for name, (table, accuracy) in predictors.items()
        }
        advance()
        aging = curve(
            {**ORDERS[PREDICTED], "aging_ms": 100_000.0}, by_rate, rates, "none", 1, classes, repeats, args.seed
        )
    return {"repeats": repeats, "figures": figures, "sizes": sizes, "table_2": table_2, "aging": aging}


def sorted_gaps(cv: float, rng: np.random.Generator) -> list[arrivals.Arrival]:
    """Gamma gaps from the shortest to the longest, as the published code has them: nearly all come at once."""
    times = [a.time for a in arrivals.gamma(JOBS + 1, CV_RATE, cv, rng)]
    return [arrivals.Arrival(float(t)) for t in np.cumsum(np.sort(np.diff(times)))]


def curve(
    order: Mapping[str, Any],
    arrive: Arrive,
    xs: Sequence[float],
    mode: str,
    seats: int,
    table: Lengths,
    repeats: int,
    seed: int,
) -> Curve:
    """Mean over `repeats` for each load; every order and mode gets the same jobs at the same times."""
    policy = PolicyConfig.model_validate(
        {**order, "batching": mode, "max_batch_size": seats, "batch_wait_timeout_ms": 1e3 * TIMEOUT}
    )
    points: Curve = {}
    for at, x in enumerate(xs):
        found = []
        for repeat in range(repeats):
            rng = np.random.default_rng([seed, at, repeat])
            served = simulate(policy, seats, join(arrive(x, rng), table, 32, rng), SSJF)
            if mode == "dynamic":
                served = returned_together(served)
            found.append((float(served.jct.mean()), served.throughput_at(0.25)))
        jct, throughput = np.mean(found, axis=0).tolist()
        points[str(x)] = (jct, throughput)
    return points


def returned_together(served: Served) -> Served:
    """A batch's answers leave when its last one is done (the paper's Fig. 3): those that began together end so."""
    _, batch = np.unique(served.first_scheduled, return_inverse=True)
    ends = np.zeros(batch.max() + 1)
    np.maximum.at(ends, batch, served.finished)
    return served.ending(ends[batch])


def table_2_predictors(
    lengths: Mapping[str, Lengths], rng: np.random.Generator
) -> dict[str, tuple[Lengths, float | None]]:
    """Lengths with the predictions of Table 2's methods that there are, and the accuracy over five classes."""
    five, three = lengths["pred_class5"], lengths["pred_class3"]
    sigma = noise_of_accuracy(five.output, ACCURACY, BOUNDS, rng)
    # Class means fall into their own class, so these are the accuracy of the classes.
    return {
        "binary classes": (three, None),
        "classes": (five, class_accuracy(five.predicted, five.output, BOUNDS)),
        "regression (L1)": (Lengths(five.input, five.output, noisy(five.output, sigma, rng)), ACCURACY),
    }


def gains(figure: Mapping[str, Curve], order: str = PREDICTED) -> tuple[float, float]:
    """(reduction of the mean JCT in per cent, throughput as a multiple) against FCFS, of the means over all loads."""
    jct, throughput = np.mean(list(figure[order].values()), axis=0)
    base_jct, base_throughput = np.mean(list(figure[FCFS].values()), axis=0)
    return 100 * (1 - jct / base_jct), throughput / base_throughput


# --- on the engine ----------------------------------------------------------------------------------------------------


def on_engine(args: argparse.Namespace, lengths: Lengths) -> dict[str, Any]:
    """JCT reductions of each turn in per cent, `{mode: {order: [turns]}}`: fewer and shorter jobs, all else alike.

    The engine's predictions are its noisy oracle's, at the noise at which they are as accurate as the paper's.
    """
    from jaxspec.config import ConfigError, parse_overrides

    try:
        more = parse_overrides(args.set)
    except ConfigError as error:
        raise BenchError(str(error)) from None
    repeats, jobs = args.repeats or 5, args.engine_jobs
    sigma = noise_of_accuracy(lengths.output, ACCURACY, BOUNDS, np.random.default_rng(args.seed))
    short = np.maximum(1, np.round(args.engine_scale * lengths.output)).astype(int)
    table = Lengths(np.full(short.shape, 32), short, np.full(short.shape, np.nan))
    results: dict[str, Any] = {}
    with options.progress("turns", len(MODES) * len(ORDERS) * (repeats + 1)) as advance:
        for mode in MODES:
            seats = 1 if mode == "none" else SEATS
            limits = {"batching": mode, "max_num_seqs": seats, "max_batch_size": seats, "draft": []}
            orders = {
                FCFS: {"order": "fcfs"},
                PREDICTED: {"order": "sjf", "predictor": "noisy_oracle", "predictor_noise": sigma},
                KNOWN: {"order": "sjf", "predictor": "oracle"},
            }
            with engines({name: {**limits, **order, **more} for name, order in orders.items()}, args.model) as loaded:
                vocabulary = next(iter(loaded.values())).engine.model_config.vocab_size

                def workload(repeat: int, size: int = vocabulary) -> tuple[Workload, list[list[int]]]:
                    rng = np.random.default_rng([args.seed, repeat])
                    work = join(arrivals.poisson(jobs, args.engine_rate, rng), table, 32, rng)
                    return work, prompt_ids(size, work.input.tolist(), rng)

                measured = turns(loaded, workload, repeats, advance)
            jct = {name: [mean_jct(turn) for turn in own] for name, own in measured.items()}
            results[mode] = {
                name: [100 * (1 - own / base) for own, base in zip(jct[name], jct[FCFS], strict=True)]
                for name in (PREDICTED, KNOWN)
            }
    return {"jobs": jobs, "scale": args.engine_scale, "rate": args.engine_rate, "reduction": results}


# --- the page ---------------------------------------------------------------------------------------------------------


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables, of what has been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    out: dict[str, str] = {}
    header = ["mean JCT, reduction against FCFS", "SSJF: paper", "simulated", "engine"]
    header += ["lengths known: paper", "simulated", "engine"]
    rows = []
    for load, title in (("rate", "varying rates (Fig. 4)"), ("cv", "varying burstiness (Fig. 5)")):
        for mode in MODES:
            paper = PAPER_JCT[load][mode]
            cells = [f"{title}, {mode} batching" if mode == "none" else f"{title}, {mode}"]
            for i, order in enumerate((PREDICTED, KNOWN)):
                here = gains(simulated["figures"][load][mode], order)[0] if simulated else None
                cells += [page.percent(paper[i]), page.percent(here)]
                cells.append(spread(engine["reduction"][mode][order]) if engine and load == "rate" else "–")
            rows.append(cells)
    out["JCT"] = page.table(header, rows)
    if simulated:
        out |= simulated_sections(simulated)
    return out


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    figures = simulated["figures"]
    rows = []
    for load, title in (("rate", "varying rates (Fig. 6)"), ("cv", "varying burstiness (Fig. 7)")):
        for mode in MODES:
            found = [gains(figures[load][mode], order)[1] for order in (PREDICTED, KNOWN)]
            paper = PAPER_THROUGHPUT[load][mode]
            cells = [v for p, f in zip(paper, found, strict=True) for v in (page.times(p), page.times(f))]
            rows.append([f"{title}, {mode}", *cells])
    header = ["throughput until a quarter is done, of FCFS's", "SSJF: paper", "simulated", "lengths known: paper"]
    out = {"throughput": page.table([*header, "simulated"], rows)}
    rows = []
    for name, (accuracy, reduction, speedup) in PAPER_TABLE_2.items():
        found = simulated["table_2"][name]
        jct, throughput = gains({k: v for k, v in found.items() if k != "accuracy"})
        known = [page.percent(None if a is None else 100 * a) for a in (accuracy, found["accuracy"])]
        rows.append([name, *known, page.percent(reduction), page.percent(jct), page.times(speedup), page.times(throughput)])
    header = ["predictions (Table 2)", "accuracy: paper", "simulated", "JCT reduction: paper", "simulated"]
    out["table 2"] = page.table([*header, "throughput: paper", "simulated"], rows)
    rows = [
        [n, *(page.percent(gains(simulated["sizes"][mode][n])[0]) for mode in ("dynamic", "continuous")),
         *(page.times(gains(simulated["sizes"][mode][n])[1]) for mode in ("dynamic", "continuous"))]
        for n in map(str, SIZES)
    ]  # fmt: skip
    header = ["batch size (Fig. 8)", "JCT reduction: dynamic", "continuous", "throughput: dynamic", "continuous"]
    out["batch sizes"] = page.table(header, rows)
    none = figures["cv, in random order"]
    rows = [
        ["Fig. 5 with gaps in random order, reduction: none, dynamic, continuous",
         ", ".join(page.percent(gains(none[mode])[0]) for mode in MODES)],
        ["Fig. 4a with aging after 100 s, reduction",
         page.percent(gains({FCFS: figures["rate"]["none"][FCFS], PREDICTED: simulated["aging"]})[0])],
    ]  # fmt: skip
    out["variations"] = page.table(["variation", "SSJF, simulated"], rows)
    return out


def spread(turns: Sequence[float]) -> str:
    """The median and the range of all turns."""
    return f"{np.median(turns):.1f} % ({min(turns):.0f} … {max(turns):.0f})"


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Figures 4 to 8 as PNG files beside the page."""
    for quantity, (label, name) in enumerate((("mean JCT, s", "jct"), ("jobs/s until a quarter is done", "throughput"))):
        for load, x_label in (("rate", "jobs a second"), ("cv", "coefficient of variation of the gaps")):
            panels = {
                mode: {
                    order: [(float(x), y[quantity]) for x, y in points.items()]
                    for order, points in simulated["figures"][load][mode].items()
                }
                for mode in MODES
            }
            plot.curves(out / f"ssjf_{name}_{load}.png", panels, x_label, label)
    sizes = {
        "reduction of mean JCT, %": {
            mode: [(float(n), gains(figure)[0]) for n, figure in by_size.items()]
            for mode, by_size in simulated["sizes"].items()
        }
    }
    plot.curves(out / "ssjf_batch_sizes.png", sizes, "batch size", "%")
