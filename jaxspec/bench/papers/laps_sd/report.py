"""Tables and figures of LAPS-SD's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.table import PERCENT, at, each, markdown, median, share, spread, walk

#: γ and δ, which the paper does not give. The first gives the lowest latency of those tried. With the last, requests
#: become stable as late as in the paper's Fig. 3, with estimates as good as in its Fig. 7: see docs/results/laps_sd.md.
STABILITY = ((3, 0.1), (5, 0.05), (10, 0.02))
LP_SJF, LAS, LAPS_SD, LATE, KNOWN = "LP-SJF", "LAS", "LAPS-SD", "LAPS-SD, stable late", "execution time known"
FCFS, TYPICAL, MIXED = "FCFS", "LAPS-SD, unknown as typical", "mixed"
TITLES = {"chat": "Chatbot Instruction Prompts", "code": "MBPP", "math": "MiniThinky"}
#: §5.2: LP-SJF is 1.47 times slower; LAPS-SD reduces the mean latency of LAS by 31 %. Fig. 7: mean errors in per cent.
PAPER_LP_SJF, PAPER_LAS = 100 * (1 - 1 / 1.47), 31.0
PAPER_ERROR = {"chat": 7.63, "code": 11.21, "math": 8.51}

Latencies = Mapping[str, float]


def reduction(latencies: Latencies, baseline: str, order: str = LAPS_SD) -> float:
    """Reduction of the mean latency relative to `baseline`, in per cent."""
    return 100 * (1 - latencies[order] / latencies[baseline])


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine, rows = kept.get("simulated"), kept.get("engine"), []
    for name, title in TITLES.items():
        points = (at(simulated, "by_count", name) or {}).values()
        for base, paper in ((LP_SJF, PAPER_LP_SJF), (LAS, PAPER_LAS)):
            found = [[reduction(point, base, order) for point in points] for order in (LAPS_SD, LATE, TYPICAL, KNOWN)]
            rows.append([f"{title}, against {base}", paper, *found, turns(at(engine, "latency", name), base, LAPS_SD)])
    kinds = [f"γ = {window}, δ = {tolerance}" for window, tolerance in (STABILITY[0], STABILITY[-1])]
    kinds = [f"simulated, {kind}" for kind in (*kinds, "unknown as typical", "execution time known")]
    columns = [("paper", PERCENT), *each(kinds, spread(middle=np.mean)), ("engine", spread())]
    out = {"latency": markdown(rows, "mean latency reduction (Fig. 5)", *columns)}
    if engine:
        titles = {MIXED: "all three kinds, mixed", **TITLES}
        bases = FCFS, LP_SJF, LAS
        out["engine"] = markdown(
            (
                [f"{titles[name]}, {engine['requests'][name]} requests", order, latencies]
                + [turns(engine["latency"][name], base, order) for base in bases]
                for name, order, latencies in walk(engine["latency"], 2)
            ),
            "engine", "order", ("mean latency, s", median("{:.2f}")),
            *each((f"against {base}" for base in bases), spread()),
        )  # fmt: skip
    return out | simulated_sections(simulated) if simulated else out


def turns(latencies: Mapping[str, Sequence[float]] | None, base: str, order: str) -> list[float] | None:
    """Reduction of the mean latency in per cent by turn; None for the base itself."""
    if latencies is None or base == order:
        return None
    return [100 * (1 - own / other) for own, other in zip(latencies[order], latencies[base], strict=True)]


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    errors = [
        [f"{TITLES[name]}, γ = {window}, δ = {tolerance}", PAPER_ERROR[name], found["mean"], found["perceived"],
         found["stable_after"]]
        for name, by_tolerance in simulated["errors"].items()
        for (window, _), (tolerance, found) in zip(STABILITY, by_tolerance.items(), strict=True)
    ]  # fmt: skip
    queues = next(walk(simulated["by_queues"], 2))[-1]
    spreads = next(iter(simulated["by_spread"].values()))
    return {
        "queues": markdown(
            (
                [f"{TITLES[name]}, {n} requests", *found.values(), min(found, key=found.__getitem__)]
                for name, n, found in walk(simulated["by_queues"], 2)
            ),
            "mean latency, s, by number of queues (Fig. 6)", *each(queues, "{:.1f}"), "best",
        ),
        "errors": markdown(
            errors, "error of the estimated execution time (Fig. 7)", *each(("paper", "simulated"), PERCENT),
            *each(("requests that become stable", "stable after, share of rounds"), share),
        ),
        "spread": markdown(
            (
                [f"{lengths}: {order} against {base}", *(reduction(point, base, order) for point in points.values())]
                for lengths, points in simulated["by_spread"].items()
                for base, order in ((LP_SJF, LAPS_SD), (LP_SJF, TYPICAL), (LP_SJF, KNOWN), (LAS, LAPS_SD))
            ),
            "mean latency reduction by spread of acceptance rate", *each(spreads, PERCENT),
        ),
        "variations": markdown(
            ([name, reduction(p, LP_SJF), reduction(p, LAS)] for name, p in simulated["variations"].items()),
            "mean latency reduction, Chatbot Instruction Prompts, 30 requests",
            *each(("against LP-SJF", "against LAS"), PERCENT),
        ),
    }  # fmt: skip


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 5 and 6 as PNG files next to the page."""
    panels = {
        title: {
            order: {n: point[order] for n, point in simulated["by_count"][name].items()}
            for order in (LP_SJF, LAS, LAPS_SD, LATE, TYPICAL)
        }
        for name, title in TITLES.items()
    }
    plot.curves(out / "laps_sd_latency.png", panels, "requests", "mean latency, s")
    panels = {
        title: {f"{n} requests": latencies for n, latencies in simulated["by_queues"][name].items()}
        for name, title in TITLES.items()
    }
    plot.curves(out / "laps_sd_queues.png", panels, "queues", "mean latency, s")
