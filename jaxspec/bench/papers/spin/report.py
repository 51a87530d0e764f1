"""Tables and figures of SPIN's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin import simulation_report as spin_simulation_page
from jaxspec.bench.papers.spin import verification_report as spin_verification_page
from jaxspec.bench.papers.spin.engine import CHOICES, KINDS, NONE, ORACLE


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    out = {}
    if engine := kept.get("engine"):
        out["engine"] = engine_section(engine)
        if engine["batches"]:
            out["batches"] = batches_section(engine["batches"])
    if pipeline := kept.get("pipeline"):
        out["pipeline"] = pipeline_section(pipeline)
    if simulated := kept.get("simulated"):
        out |= spin_simulation_page.sections(simulated)
    if verification := kept.get("verification"):
        out |= spin_verification_page.sections(verification)
    return out


def best_alone(engine: Mapping[str, Any]) -> str:
    """The drafter with the highest median goodput when it drafts for all requests."""
    systems = engine["systems"]
    drafters = [name for name in systems if name not in (NONE, *CHOICES, ORACLE)]
    return max(drafters, key=lambda name: np.median(systems[name]["goodput"]))


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratio per turn."""
    return [a / b for a, b in zip(values, base, strict=True)]


def engine_section(engine: Mapping[str, Any]) -> str:
    systems, base = engine["systems"], best_alone(engine)
    kinds = [kind for kind in (*KINDS, "built-in") if kind in systems[NONE]]
    rows = []
    for name, own in systems.items():
        rows.append(
            [
                name,
                page.spread(own["goodput"], "{:.1f}"),
                page.spread(ratios(own["goodput"], systems[base]["goodput"]), "{:.3f}", "{:.2f}"),
                f"{np.median(own['accepted']):.2f}",
                f"{100 * np.median(own['drafted']):.0f} %",
                *(f"{np.median(own[kind]):.1f}" for kind in kinds),
                f"{np.median(own['switches']):.0f}",
                f"{100 * np.median(ratios(own['switch_seconds'], own['seconds'])):.2f} %",
            ]
        )
    header = [
        "engine", "goodput, tokens/s", f"relative to {base}", "mean accepted length", "verifications per token",
        *(f"{kind}: tokens/s per request" for kind in kinds), "drafter switches", "share of time switching",
    ]  # fmt: skip
    best = ", ".join(f"{name} {count}" for name, count in sorted(engine["best"].items(), key=lambda item: -item[1]))
    text = f"{engine['prompts']} requests, {engine['concurrency']} at once, up to {engine['tokens']} tokens each."
    return page.table(header, rows) + f"\n\n{text} Requests by their fastest drafter: {best}."


def batches_section(batches: Mapping[str, Any]) -> str:
    names = list(next(iter(batches.values())))
    rows = [
        [
            size,
            *(page.spread(own[name]["goodput"], "{:.1f}") for name in names),
            *(f"{np.median(ratios(own[name]['goodput'], own[NONE]['goodput'])):.2f}×" for name in names[1:]),
        ]
        for size, own in batches.items()
    ]
    header = ["batch size", *(f"{name}, tokens/s" for name in names), *(f"speedup of {name}" for name in names[1:])]
    return page.table(header, rows)


def pipeline_section(pipeline: Mapping[str, Any]) -> str:
    places = pipeline["places"]
    rows = []
    for place, own in places.items():
        speed = {name: [turn["tokens_per_s"] for turn in turns] for name, turns in own.items()}
        steps = {name: np.median([turn["steps"] for turn in turns]) for name, turns in own.items()}
        rows += [
            [
                place,
                name,
                page.spread(speed[name], "{:.1f}"),
                page.spread(ratios(speed[name], speed["1"]), "{:.2f}×", "{:.2f}"),
                f"{steps[name] / steps['1']:.1f}",
            ]
            for name in own
        ]
    header = ["drafter on", "micro-batches", "tokens/s", "relative to one", "target steps relative to one"]
    text = (
        f"{pipeline['draft']}, chains of {pipeline['levels']}, {pipeline['concurrency']} requests at once,"
        f" {pipeline['tokens']} tokens each."
    )
    return page.table(header, rows) + f"\n\n{text}"


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(out: Path, kept: Mapping[str, Any]) -> None:
    """Draw PNG files next to the page."""
    if engine := kept.get("engine"):
        systems = engine["systems"]
        bars = {name: own["goodput"] for name, own in systems.items()}
        plot.turns(out / "spin_choices.png", {"": bars}, "goodput, tokens/s")
        if engine["batches"]:
            curves = {
                name: [(float(n), float(np.median(own[name]["goodput"]))) for n, own in engine["batches"].items()]
                for name in next(iter(engine["batches"].values()))
            }
            plot.lines(out / "spin_batches.png", curves, "batch size", "goodput, tokens/s", "Fig. 4 on the engine")
    if pipeline := kept.get("pipeline"):
        curves = {
            place: [
                (float(name), float(np.median([turn["tokens_per_s"] for turn in turns])))
                for name, turns in own.items()
                if name.isdigit()
            ]
            for place, own in pipeline["places"].items()
        }
        plot.curves(out / "spin_pipeline.png", {"": curves}, "micro-batches", "tokens/s")
    if verification := kept.get("verification"):
        spin_verification_page.draw(out, verification)
    if simulated := kept.get("simulated"):
        spin_simulation_page.draw(out, simulated)
