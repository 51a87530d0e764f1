"""Tables and figures of SSJF's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page

MODES = ("none", "dynamic", "continuous")
NAMES = FCFS, CLASSES, NOISY, KNOWN = "FCFS", "SSJF, predicted classes", "SSJF, noisy lengths", "SJF, lengths known"
#: §4.2: reduction of the mean JCT in per cent, and throughput relative to FCFS; (SSJF, lengths known).
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
#: (mean JCT in seconds, throughput in jobs per second) by load, the number as text.
Curve = dict[str, tuple[float, float]]


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    rows = []
    for load, title in (("rate", "rates (Fig. 4)"), ("cv", "burstiness (Fig. 5)")):
        for mode in MODES:
            figure = simulated["figures"][load][mode] if simulated else None
            turns = engine["reduction"][mode] if engine and load == "rate" else {}
            found = {order: page.percent(gains(figure, order)[0] if figure else None) for order in NAMES}
            paper = [page.percent(value) for value in PAPER_JCT[load][mode]]
            cells = [paper[0], found[CLASSES], found[NOISY], page.spread(turns.get(NOISY))]
            rows.append([f"{title}, {mode}", *cells, paper[1], found[KNOWN], page.spread(turns.get(KNOWN))])
    header = ["mean JCT reduction", "SSJF: paper", "simulated, classes", "simulated, noisy", "engine, noisy"]
    out = {"JCT": page.table([*header, "lengths known: paper", "simulated", "engine"], rows)}
    return out | simulated_sections(simulated) if simulated else out


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    figures, extra = simulated["figures"], simulated["extra"]
    out, rows = {}, []
    for load, title in (("rate", "rates (Fig. 6)"), ("cv", "burstiness (Fig. 7)")):
        for mode in MODES:
            found = [page.times(gains(figures[load][mode], order)[1]) for order in (CLASSES, NOISY, KNOWN)]
            paper = [page.times(value) for value in PAPER_THROUGHPUT[load][mode]]
            rows.append([f"{title}, {mode}", paper[0], *found[:2], paper[1], found[2]])
    header = ["throughput until a quarter of the jobs is done", "SSJF: paper", "simulated, classes", "simulated, noisy"]
    out["throughput"] = page.table([*header, "lengths known: paper", "simulated"], rows)

    plain, rows = figures["rate"]["none"], []
    methods = {
        "binary classes": ({FCFS: plain[FCFS], CLASSES: extra["binary classes"]}, CLASSES, None),
        "classes": (plain, CLASSES, simulated["accuracy"][CLASSES]),
        "regression (L1)": (plain, NOISY, simulated["accuracy"][NOISY]),
    }
    for name, (accuracy, *paper) in PAPER_TABLE_2.items():
        figure, order, known = methods[name]
        jct, throughput = gains(figure, order)
        shares = [page.percent(None if a is None else 100 * a) for a in (accuracy, known)]
        row = [*shares, page.percent(paper[0]), page.percent(jct), page.times(paper[1]), page.times(throughput)]
        rows.append([name, *row])
    header = ["predictions (Table 2)", "accuracy: paper", "simulated", "JCT reduction: paper", "simulated"]
    out["table 2"] = page.table([*header, "throughput: paper", "simulated"], rows)

    rows = []
    for n in simulated["sizes"]["dynamic"]:
        by_mode = [gains(simulated["sizes"][mode][n]) for mode in ("dynamic", "continuous")]
        rows.append([n, *(page.percent(jct) for jct, _ in by_mode), *(page.times(t) for _, t in by_mode)])
    header = ["batch size (Fig. 8)", "JCT reduction: dynamic", "continuous", "throughput: dynamic", "continuous"]
    out["batch sizes"] = page.table(header, rows)

    variations = {
        "continuous, {1} jobs instead of {0}".format(*simulated["jobs"]): figures["rate, more jobs"]["continuous"],
        "rates, dynamic, batches wait 10 s instead of 50 ms": simulated["patient"]["rate"],
        "burstiness, dynamic, batches wait 10 s": simulated["patient"]["cv"],
        "no batching, aging after 100 s": {**plain, CLASSES: extra["aging"]},
        **{f"burstiness, gaps in random order, {m}": figures["cv, in random order"][m] for m in MODES},
    }
    orders = (CLASSES, NOISY, KNOWN)
    rows = []
    for name, figure in variations.items():
        simulated_orders = orders if "aging" not in name else (CLASSES,)
        rows.append([name, *(page.percent(gains(figure, o)[0] if o in simulated_orders else None) for o in orders)])
    out["variations"] = page.table(["mean JCT reduction", "classes", "noisy", "lengths known"], rows)
    return out


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 4 to 8 as PNG files next to the page."""
    for quantity, (label, name) in enumerate(
        (("mean JCT, s", "jct"), ("jobs/s until a quarter is done", "throughput"))
    ):
        for load, x_label in (("rate", "jobs/s"), ("cv", "coefficient of variation of the gaps")):
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


def gains(figure: Mapping[str, Curve], order: str = CLASSES) -> tuple[float, float]:
    """(reduction of the mean JCT in per cent, throughput ratio) relative to FCFS, from the means over all loads."""
    jct, throughput = np.mean(list(figure[order].values()), axis=0)
    base_jct, base_throughput = np.mean(list(figure[FCFS].values()), axis=0)
    return 100 * (1 - jct / base_jct), throughput / base_throughput
