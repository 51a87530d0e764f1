"""Figures of LAPS-SD's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.papers.laps_sd.report import LAPS_SD, LAS, LATE, LP_SJF, TITLES, TYPICAL, arrivals_title, nested


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 2, 3, 5, 6 and the map as PNG files next to the page."""
    by_quantum: dict[str, dict[str, Any]] = {}
    for key, share in simulated["switching"].items():
        quantum, tokens = key.split(" | ")
        by_quantum.setdefault(f"{quantum} ms", {})[tokens] = 100 * share[0]
    plot.curves(out / "laps_sd_switching.png", {"switches": by_quantum}, "output tokens", "% of the time of all else")
    plot.curves(
        out / "laps_sd_settling.png", {"acceptance rate so far": simulated["settling"]["curves"]}, "output tokens",
        "acceptance rate",
    )  # fmt: skip
    panels = {
        title: {
            order: {n: found[order]["jct"] for n, found in simulated["counts"][name].items()}
            for order in (LP_SJF, LAS, LAPS_SD, LATE, TYPICAL)
        }
        for name, title in TITLES.items()
    }
    plot.curves(out / "laps_sd_latency.png", panels, "requests", "mean latency, s")
    panels = {
        title: {
            f"{key.split(' | ')[1]} requests": found["latency"]
            for key, found in simulated["queues"].items() if key.startswith(name)
        }
        for name, title in TITLES.items()
    }  # fmt: skip
    plot.curves(out / "laps_sd_queues.png", panels, "queues", "mean latency, s")
    points = nested(simulated["map"])
    for base, name in ((LP_SJF, "lp_sjf"), (LAS, "las")):
        panels = {
            arrivals_title(load): {
                f"σ = {sigma}": {spread: _relative(own[LAPS_SD][base]["jct"]) for spread, own in found.items()}
                for sigma, found in by_sigma.items()
            }
            for load, by_sigma in points.items()
        }
        plot.curves(out / f"laps_sd_map_{name}.png", panels, "spread of acceptance", f"mean latency by that of {base}")


def _relative(reduced: Sequence[float] | None) -> list[float] | None:
    """A reduction in per cent as the ratio that is left."""
    return None if reduced is None else [1 - x / 100 for x in reduced]
