"""Tables and figures of SSJF's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.table import PERCENT, TIMES, at, each, markdown, share, spread

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
    simulated, rows = kept.get("simulated"), []
    for load, title in (("rate", "rates (Fig. 4)"), ("cv", "burstiness (Fig. 5)")):
        for mode, paper in PAPER_JCT[load].items():
            figure = at(simulated, "figures", load, mode)
            found = {order: gains(figure, order)[0] if figure else None for order in NAMES}
            turns = at(kept, "engine", "reduction", mode) if load == "rate" else {}
            ours = at(turns, NOISY), paper[1], found[KNOWN], at(turns, KNOWN)
            rows.append([f"{title}, {mode}", paper[0], found[CLASSES], found[NOISY], *ours])
    out = {
        "JCT": markdown(
            rows, "mean JCT reduction", *each(("SSJF: paper", "simulated, classes", "simulated, noisy"), PERCENT),
            ("engine, noisy", spread()), *each(("lengths known: paper", "simulated"), PERCENT), ("engine", spread()),
        )
    }  # fmt: skip
    return out | simulated_sections(simulated) if simulated else out


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    figures, extra, accuracy = simulated["figures"], simulated["extra"], simulated["accuracy"]
    out, rows = {}, []
    for load, title in (("rate", "rates (Fig. 6)"), ("cv", "burstiness (Fig. 7)")):
        for mode, paper in PAPER_THROUGHPUT[load].items():
            found = [gains(figures[load][mode], order)[1] for order in (CLASSES, NOISY, KNOWN)]
            rows.append([f"{title}, {mode}", paper[0], *found[:2], paper[1], found[2]])
    orders = "SSJF: paper", "simulated, classes", "simulated, noisy", "lengths known: paper", "simulated"
    out["throughput"] = markdown(rows, "throughput until a quarter of the jobs is done", *each(orders, TIMES))

    plain, rows = figures["rate"]["none"], []
    methods = {
        "binary classes": ({FCFS: plain[FCFS], CLASSES: extra["binary classes"]}, CLASSES, None),
        "classes": (plain, CLASSES, accuracy[CLASSES]),
        "regression (L1)": (plain, NOISY, accuracy[NOISY]),
    }
    for name, paper in PAPER_TABLE_2.items():
        figure, order, known = methods[name]
        jct, throughput = gains(figure, order)
        rows.append([name, paper[0], known, paper[1], jct, paper[2], throughput])
    out["table 2"] = markdown(
        rows, "predictions (Table 2)", *each(("accuracy: paper", "simulated"), share),
        *each(("JCT reduction: paper", "simulated"), PERCENT), *each(("throughput: paper", "simulated"), TIMES),
    )  # fmt: skip

    dynamic, continuous = simulated["sizes"]["dynamic"], simulated["sizes"]["continuous"]
    out["batch sizes"] = markdown(
        ([n, *(found for i in (0, 1) for found in (gains(dynamic[n])[i], gains(continuous[n])[i]))] for n in dynamic),
        "batch size (Fig. 8)", *each(("JCT reduction: dynamic", "continuous"), PERCENT),
        *each(("throughput: dynamic", "continuous"), TIMES),
    )  # fmt: skip

    variations = {
        "continuous, {1} jobs instead of {0}".format(*simulated["jobs"]): figures["rate, more jobs"]["continuous"],
        "rates, dynamic, batches wait 10 s instead of 50 ms": simulated["patient"]["rate"],
        "burstiness, dynamic, batches wait 10 s": simulated["patient"]["cv"],
        "no batching, aging after 100 s": {FCFS: plain[FCFS], CLASSES: extra["aging"]},
        **{f"burstiness, gaps in random order, {m}": figures["cv, in random order"][m] for m in MODES},
    }
    out["variations"] = markdown(
        (
            [name, *(gains(figure, order)[0] if order in figure else None for order in (CLASSES, NOISY, KNOWN))]
            for name, figure in variations.items()
        ),
        "mean JCT reduction", *each(("classes", "noisy", "lengths known"), PERCENT),
    )  # fmt: skip
    return out


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 4 to 8 as PNG files next to the page."""
    for load, x_label in (("rate", "jobs/s"), ("cv", "coefficient of variation of the gaps")):
        for value, name, label in ((0, "jct", "mean JCT, s"), (1, "throughput", "jobs/s until a quarter is done")):
            panels = simulated["figures"][load]
            plot.curves(out / f"ssjf_{name}_{load}.png", panels, x_label, label, itemgetter(value))
    panels = {"reduction of mean JCT, %": simulated["sizes"]}
    plot.curves(out / "ssjf_batch_sizes.png", panels, "batch size", "%", lambda figure: gains(figure)[0])


def gains(figure: Mapping[str, Curve], order: str = CLASSES) -> tuple[float, float]:
    """(reduction of the mean JCT in per cent, throughput ratio) relative to FCFS, from the means over all loads."""
    jct, throughput = np.mean(list(figure[order].values()), axis=0)
    base_jct, base_throughput = np.mean(list(figure[FCFS].values()), axis=0)
    return 100 * (1 - jct / base_jct), throughput / base_throughput
