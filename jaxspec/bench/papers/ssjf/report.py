"""Tables, headlines and figures of SSJF's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.estimates import interval
from jaxspec.bench.papers.headlines import Headline, table
from jaxspec.bench.table import PERCENT, TIMES, at, each, markdown, share

MODES = ("none", "dynamic", "continuous")
NAMES = FCFS, CLASSES, NOISY, KNOWN = "FCFS", "SSJF, predicted classes", "SSJF, noisy lengths", "SJF, lengths known"
TITLES = {"rate": "rates (Fig. 4)", "cv": "burstiness (Fig. 5)"}
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
#: Fig. 9: (JCT reduction in per cent, throughput) in the first round and the fifth; the text gives no others.
PAPER_ROUNDS = {1: (38.9, 2.22), 5: (33.1, 1.67)}
PER_CENT, RATIO = interval(PERCENT), interval(TIMES)


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    """§4.2: the reduction of the mean JCT and the throughput in each mode, with predictions of the accuracy that the
    figures' have."""
    seeds = at(kept, "simulated", "seeds")
    found, throughputs = [], []
    for load, title in TITLES.items():
        for mode in MODES:
            ours = at(kept, "simulated", "figures", f"{load}, {mode}", NOISY)
            engine = at(kept, "engine", "reduction", mode, NOISY) if load == "rate" else None
            why, why_slower = BECAUSE.get((load, mode), ("", ""))
            paper, of_throughput = PAPER_JCT[load][mode][0], PAPER_THROUGHPUT[load][mode][0]
            what = f"mean JCT below FCFS, {title}, {named(mode)}"
            found.append(Headline(what, paper, at(ours, "jct"), engine, PERCENT, why, seeds=seeds))
            what = f"throughput relative to FCFS, until a quarter is done, {_of_throughput(title)}, {named(mode)}"
            throughputs.append(Headline(what, of_throughput, at(ours, "quarter"), because=why_slower, seeds=seeds))
    return [*found, *throughputs]


def _of_throughput(title: str) -> str:
    """The title with the number of the figure that has the throughput at the same loads."""
    return title.replace("4", "6").replace("5", "7")


def named(mode: str) -> str:
    return f"{'no' if mode == 'none' else mode} batching"


#: Why the two headlines of a load and mode, JCT and throughput, are missed; the page's tables show what changes it.
BECAUSE = {
    ("rate", "continuous"): (
        "four of 50 jobs always run: two seats, the published default, or 200 jobs give 38 and 39 %",
        "four of 50 jobs always run: two seats give 2.67×, 200 jobs 2.21×",
    ),
    ("cv", "continuous"): ("four of 50 jobs always run: two seats, the published default, give 33 %", ""),
}


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated = kept.get("simulated")
    out = {"headlines": table(headlines(kept))}
    if not simulated:
        return out
    figures = simulated["figures"]
    rows, throughputs = [], []
    for load, title in TITLES.items():
        for mode in MODES:
            figure, paper = figures[f"{load}, {mode}"], PAPER_JCT[load][mode]
            turns = at(kept, "engine", "reduction", mode) if load == "rate" else None
            found = {order: figure[order]["jct"] for order in figure}
            rows.append(
                [f"{title}, {mode}", paper[0], found[CLASSES], found[NOISY], at(turns, NOISY), paper[1], found[KNOWN],
                 at(turns, KNOWN)]
            )  # fmt: skip
            paper = PAPER_THROUGHPUT[load][mode]
            quarter = {order: figure[order]["quarter"] for order in figure}
            throughputs.append(
                [f"{_of_throughput(title)}, {mode}", paper[0], quarter[CLASSES], quarter[NOISY],
                 paper[1], quarter[KNOWN], figure[CLASSES]["ttft"], figure[CLASSES]["throughput"]]
            )  # fmt: skip
    out["JCT"] = markdown(
        rows, "mean JCT reduction", ("SSJF: paper", PERCENT),
        *each(("simulated, classes", "simulated, noisy", "engine, noisy"), PER_CENT),
        ("lengths known: paper", PERCENT), *each(("simulated", "engine"), PER_CENT),
    )  # fmt: skip
    out["throughput"] = markdown(
        throughputs, "throughput until a quarter of the jobs is done", ("SSJF: paper", TIMES),
        *each(("simulated, classes", "simulated, noisy"), RATIO), ("lengths known: paper", TIMES), ("simulated", RATIO),
        ("classes: mean TTFT below FCFS", PER_CENT), ("throughput until all are done", RATIO),
    )  # fmt: skip
    return out | _ablations(simulated) | _more(simulated)


def _ablations(simulated: Mapping[str, Any]) -> dict[str, str]:
    figures, accuracy, out = simulated["figures"], simulated["accuracy"], {}
    methods = {
        "binary classes": (figures["binary classes"][CLASSES], None),
        "classes": (figures["rate, none"][CLASSES], accuracy[CLASSES]),
        "regression (L1)": (figures["rate, none"][NOISY], accuracy[NOISY]),
    }
    rows = [
        [name, paper[0], methods[name][1], paper[1], methods[name][0]["jct"], paper[2], methods[name][0]["quarter"]]
        for name, paper in PAPER_TABLE_2.items()
    ]
    out["table 2"] = markdown(
        rows, "predictions (Table 2)", *each(("accuracy: paper", "simulated"), share),
        ("JCT reduction: paper", PERCENT), ("simulated", PER_CENT), ("throughput: paper", TIMES), ("simulated", RATIO),
    )  # fmt: skip
    out["rounds"] = markdown(
        (
            [f"round {number}", *PAPER_ROUNDS.get(number, (None, None)), found[NOISY]["jct"], found[NOISY]["quarter"],
             found[KNOWN]["jct"]]
            for number in range(1, 6) for found in [figures[f"round {number}"]]
        ),
        "conversations (Fig. 9), no batching", ("JCT reduction: paper", PERCENT), ("throughput: paper", TIMES),
        ("JCT reduction, noisy", PER_CENT), ("throughput, noisy", RATIO), ("JCT reduction, lengths known", PER_CENT),
    )  # fmt: skip
    names = [name for name in figures if name.startswith("model ")]
    out["models"] = markdown(
        (
            [name.removeprefix("model "), *(figures[name][order]["jct"] for order in (CLASSES, NOISY, KNOWN))]
            for name in names
        ),
        "mean JCT reduction, models of Table 1, no batching", *each(("classes", "noisy", "lengths known"), PER_CENT),
    )  # fmt: skip
    return out


def _more(simulated: Mapping[str, Any]) -> dict[str, str]:
    figures, out = simulated["figures"], {}
    sizes = [name.removeprefix("dynamic, ") for name in figures if name.startswith("dynamic, ")]
    out["batch sizes"] = markdown(
        (
            [n, *(figures[f"{mode}, {n}"][CLASSES][metric] for mode in MODES[1:] for metric in ("jct", "quarter"))]
            for n in sizes
        ),
        "batch size (Fig. 8)", ("JCT reduction: dynamic", PER_CENT), ("throughput", RATIO),
        ("JCT reduction: continuous", PER_CENT), ("throughput", RATIO),
    )  # fmt: skip
    variations = {
        "rates, continuous, 2 seats (published default)": "rate, continuous, 2 seats",
        "burstiness, continuous, 2 seats": "cv, continuous, 2 seats",
        "rates, continuous, 200 jobs instead of 50": "rate, continuous, 200 jobs",
        "rates, dynamic, batches wait 10 s instead of 50 ms": "rate, dynamic, 10 s",
        "burstiness, dynamic, batches wait 10 s": "cv, dynamic, 10 s",
        **{f"Azure's functions trace, {mode}": f"trace, {mode}" for mode in MODES},
        **{f"burstiness, gaps in random order, {mode}": f"cv, in random order, {mode}" for mode in MODES},
    }
    rows = [
        [title, *(at(figures, name, order, "jct") for order in (CLASSES, NOISY, KNOWN)),
         *(at(figures, name, order, "quarter") for order in (CLASSES, NOISY))]
        for title, name in variations.items()
    ]  # fmt: skip
    aging = figures["aging"]["aging"]
    rows.append(["rates, no batching, aging after 100 s", aging["jct"], None, None, aging["quarter"], None])
    out["variations"] = markdown(
        rows, "mean JCT reduction", *each(("classes", "noisy", "lengths known"), PER_CENT),
        *each(("throughput until a quarter is done: classes", "noisy"), RATIO),
    )  # fmt: skip
    knees = simulated["knees"]
    out["knees"] = markdown(
        ([order, *(knees[mode][order] for mode in MODES)] for order in knees["none"]),
        "jobs/s at a mean JCT of 60 s", *each(MODES, interval("{:.2f}")),
    )  # fmt: skip
    return out


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 4 to 8 as PNG files next to the page."""
    for load, x_label in (("rate", "jobs/s"), ("cv", "coefficient of variation of the gaps")):
        for metric, name, label in (("jct", "jct", "mean JCT, s"), ("quarter", "throughput", "jobs/s until a quarter")):
            panels = {mode: simulated["curves"][f"{load}, {mode}"][metric] for mode in MODES}
            plot.curves(out / f"ssjf_{name}_{load}.png", panels, x_label, label)
    figures = simulated["figures"]
    sizes = {
        mode: {n.removeprefix(f"{mode}, "): figures[n][CLASSES]["jct"] for n in figures if n.startswith(f"{mode}, ")}
        for mode in MODES[1:]
    }
    plot.curves(out / "ssjf_batch_sizes.png", {"reduction of mean JCT, %": sizes}, "batch size", "%")
