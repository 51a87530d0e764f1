"""Tables and figures of SPIN's simulated experiments, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin.costs import CHOICE_ALONE, VANILLA_68M, VERIFIED_PACKED, VERIFIED_PADDED
from jaxspec.bench.papers.spin.difficulty import BEST_FOR_ALL, BEST_WITH_265M, SSMS, WORST_FOR_ALL
from jaxspec.bench.papers.spin.simulation import BATCHES, LBSS_SETTINGS, LLM, PARTS
from jaxspec.bench.papers.spin.systems import (
    CHOICES,
    GREEDY,
    LEARNED,
    ORACLE,
    OURS,
    SPIN,
    SYSTEMS,
    TOGETHER,
    UNPACKED,
    UNPIPED,
)

TITLES = {"alpaca": "Alpaca", "cp": "CP", "cip": "CIP", "mix": "Mix"}
#: §VI-B1, LLaMA-7B: SPIN's goodput relative to the baselines on Alpaca; on CP with each component added.
PAPER_ALPACA, PAPER_CP = 2.34, {UNPACKED: 1.45, UNPIPED: 1.81, SPIN: 1.99}
#: §VI-B2, Alpaca, LLaMA-7B: accepted tokens per second.
PAPER_CHOICES = {GREEDY: "32.21", "ε-greedy": "43.78", LEARNED: "65.31"}

Point = Mapping[str, float]
Points = Mapping[str, Point]


def vanilla(points: Points, what: str = "accepted") -> list[float]:
    return [points[name][what] for name in SSMS]


def gains(points: Points, name: str, what: str = "accepted") -> str:
    """Ratios to the best, the mean and the worst single draft model."""
    bases = vanilla(points, what)
    return " / ".join(f"{points[name][what] / base:.2f}" for base in (max(bases), float(np.mean(bases)), min(bases)))


def sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    """Markdown tables by name."""
    return {
        "simulated summary": summary(simulated),
        "simulated facts": facts(simulated),
        **{f"simulated goodput {kind}": goodputs(found) for kind, found in simulated["goodput"].items()},
        "simulated selection": selection(simulated["selection"]),
        "simulated verification": verification(simulated["verification"]),
        "simulated speedup": speedup(simulated["speedup"]),
        "simulated pipeline": pipeline(simulated["pipeline"]),
        "simulated residual": residual(simulated["residual"]),
        "simulated lbss": lbss(simulated["settings"]),
    }


def summary(simulated: Mapping[str, Any]) -> str:
    """The numbers that the paper's text gives."""
    measured, roofline = (simulated["goodput"][kind][LLM] for kind in ("as measured", "roofline"))
    alpaca = measured["alpaca"]
    rows = [
        [f"SPIN relative to other baselines, {TITLES[name]} (Fig. 10)", paper]
        + [gains(found[name], SPIN) for found in (measured, roofline)]
        for name, paper in (("alpaca", f"{PAPER_ALPACA}×"), ("cp", f"{PAPER_CP[SPIN]}×"))
    ]
    rows += [
        [f"{name} relative to baselines, CP", f"{PAPER_CP[name]}×"]
        + [gains(found["cp"], name) for found in (measured, roofline)]
        for name in (UNPACKED, UNPIPED)
    ]
    rows.append(
        ["jaxspec relative to baselines, Alpaca", "–"]
        + [gains(found["alpaca"], OURS) for found in (measured, roofline)]
    )
    rows.append(
        ["jaxspec relative to baselines, CP", "–"] + [gains(found["cp"], OURS) for found in (measured, roofline)]
    )
    rows.append(
        [
            "68M for all, Alpaca, tokens/s (used to fit the acceptance rates)",
            f"{VANILLA_68M}",
            f"{alpaca['68M']['accepted']:.1f}",
            "–",
        ]
    )
    rows.append([f"{UNPACKED}, Alpaca, tokens/s", f"{CHOICE_ALONE}", f"{alpaca[UNPACKED]['accepted']:.1f}", "–"])
    latency = simulated["verification"]["alpaca"]
    for name, paper in (("padded", VERIFIED_PADDED), ("packed", VERIFIED_PACKED)):
        found = latency[name]["16"]["ms"]
        rows.append(
            [
                f"verification of 16, {name}, Alpaca, ms (used to fit the times)",
                f"{1e3 * paper:.0f}",
                f"{found:.0f}",
                "–",
            ]
        )
    for kind, name in (("steps", "within a step, as the engine"), ("flowing", "across steps")):
        found = simulated["pipeline"]["8"]["alpaca"][kind]
        best = max((parts for parts in found if parts != "None"), key=lambda parts: found[parts]["accepted"])
        rows.append([
            f"best number of micro-batches, Alpaca, {name} (Fig. 13)", "5; with 4 1.29×",
            f"{best}; {found[best]['accepted'] / found['1']['accepted']:.2f}×", "–",
        ])  # fmt: skip
    alone = [simulated["speedup"][kind]["padded"]["1"] for kind in ("as measured", "roofline")]
    cells = [" / ".join(f"{one[name] / one['none']:.2f}×" for name in ("68M", "1.1B")) for one in alone]
    rows.append(["speedup of speculation with 68M / 1.1B, one request (Fig. 4)", "1.61×", *cells])
    return page.table(
        ["relative to best / mean / worst single draft model", "paper", "as measured by the paper", "roofline"], rows
    )


def facts(simulated: Mapping[str, Any]) -> str:
    """Published facts about the requests, next to those of the simulated ones."""
    found, points = simulated["facts"], simulated["goodput"]["as measured"][LLM]
    rows = []
    for name, title in TITLES.items():
        by_speed = sorted(SSMS, key=lambda ssm: -points[name][ssm]["accepted"])
        shares = " / ".join(f"{100 * share:.0f}" for share in found[name]["best"])
        rates = " / ".join(f"{rate:.2f}" for rate in found[name]["rates"])
        paper = f"{100 * BEST_WITH_265M[name]:.0f} %" if name in BEST_WITH_265M else "–"
        worst = " and ".join(sorted(by_speed[-2:], key=SSMS.index))
        rows.append([title, paper, shares, BEST_FOR_ALL.get(name, "–"), by_speed[0], worst, rates])
    worst = " and ".join(sorted(WORST_FOR_ALL, key=SSMS.index))
    header = [
        f"({' / '.join(SSMS)})", "paper: best served with 265M", "model: best served, %", "paper: best for all",
        "simulated", f"simulated: two worst (paper: {worst})", "model: mean rates",
    ]  # fmt: skip
    return page.table(header, rows)


def goodputs(by_llm: Mapping[str, Mapping[str, Points]]) -> str:
    rows = []
    for llm, by_data in by_llm.items():
        for name in SYSTEMS:
            cells = [f"{found[name]['accepted']:.1f} / {found[name]['tokens']:.1f}" for found in by_data.values()]
            rows.append([llm, name, *cells])
    return page.table(["accepted / all tokens per second", "system", *TITLES.values()], rows)


def selection(by_llm: Mapping[str, Mapping[str, Points]]) -> str:
    rows = []
    for llm, by_data in by_llm.items():
        for name in CHOICES:
            paper = PAPER_CHOICES.get(name, "–") if llm == LLM else "–"
            cells = [
                f"{found[name]['accepted']:.1f}" + (f" ({found[name]['own']:.1f})" if "own" in found[name] else "")
                for found in by_data.values()
            ]
            rows.append([llm, name, paper, *cells])
    header = "accepted tokens per second (all tokens per second of the slots' own time, without waiting)"
    return page.table([header, "draft choice", "paper: Alpaca", *TITLES.values()], rows)


def verification(by_data: Mapping[str, Mapping[str, Points]]) -> str:
    rows = []
    for name, found in by_data.items():
        for kind, by_batch in found.items():
            cells = [f"{own['ms']:.0f} ({own['gigabytes']:.1f})" for own in by_batch.values()]
            rows.append([TITLES[name], kind, *cells])
    return page.table(["ms per verification (peak GB of KV), by batch size", "", *map(str, BATCHES)], rows)


def speedup(kinds: Mapping[str, Mapping[str, Points]]) -> str:
    rows = []
    for kind, found in kinds.items():
        for how, by_batch in found.items():
            for ssm in ("68M", "1.1B"):
                rows.append([kind, how, ssm, *(f"{own[ssm] / own['none']:.2f}×" for own in by_batch.values())])
    return page.table(["Alpaca, speedup over no drafts, by batch size", "", "draft model", *map(str, BATCHES)], rows)


def pipeline(crowds: Mapping[str, Mapping[str, Mapping[str, Points]]]) -> str:
    rows = []
    for concurrency, by_data in crowds.items():
        for name, kinds in by_data.items():
            for kind, found in kinds.items():
                base = found["1"]["accepted"]
                cells = [f"{found[str(parts)]['accepted'] / base:.2f}×" for parts in PARTS]
                rows.append([f"{TITLES[name]}, {concurrency} requests", kind, *cells])
    names = ["heuristic" if parts is None else str(parts) for parts in PARTS]
    return page.table(["goodput relative to one micro-batch", "", *names], rows)


def residual(found: Mapping[str, Points]) -> str:
    rows = []
    for spread, points in found.items():
        best = max(vanilla(points))
        cells = [
            f"{points[name]['accepted']:.1f} ({points[name]['accepted'] / best:.2f}×)"
            for name in (LEARNED, ORACLE, TOGETHER)
        ]
        own = points[LEARNED]["own"] / points[ORACLE]["own"]
        rows.append([spread, f"{best:.1f}", *cells, f"{own:.2f}"])
    header = [
        "σ of the residual, in logits",
        "best single draft model",
        LEARNED,
        ORACLE,
        TOGETHER,
        "LBSS / oracle, slots' own time",
    ]
    return page.table(header, rows)


def lbss(by_answer: Mapping[str, Any]) -> str:
    rows = []
    for i, own in enumerate(LBSS_SETTINGS):
        title = f"α {own['exploration']}, β {own['chunk']}" + ("" if own.get("prior", True) else ", no prior")
        title += f", {own['prior_slots']:g} prior slots" if "prior_slots" in own else ""
        title += f", from epoch {own['prior_epoch']}" if "prior_epoch" in own else ""
        cells: list[str] = []
        for found in by_answer.values():
            point, oracle = found["settings"][i], found[ORACLE]
            cells.append(f"{point['tokens'] / oracle['tokens']:.2f} / {point['own'] / oracle['own']:.2f}")
        rows.append([title, *cells])
    for name in (TOGETHER, *SSMS):
        cells = [
            f"{found[name]['tokens'] / found[ORACLE]['tokens']:.2f} / {found[name]['own'] / found[ORACLE]['own']:.2f}"
            for found in by_answer.values()
        ]
        rows.append([name if name == TOGETHER else f"{name} for all", *cells])
    header = "all tokens per second relative to the oracle / the same over the slots' own time"
    return page.table([header, *(f"{n} tokens" for n in by_answer)], rows)


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 10, 11 and 13 as PNG files next to the page. Raises `BenchError`."""
    by_data = simulated["goodput"]["as measured"][LLM]
    bars(out / "spin_goodput.png", by_data, tuple(SYSTEMS))
    bars(out / "spin_selection.png", simulated["selection"][LLM], tuple(CHOICES))
    panels = {
        f"{TITLES[name]}, {concurrency} requests": {
            kind: [(float(parts), found[parts]["accepted"]) for parts in found if parts != "None"]
            for kind, found in kinds.items()
        }
        for concurrency, by_name in simulated["pipeline"].items()
        for name, kinds in by_name.items()
    }
    plot.curves(out / "spin_simulated_pipeline.png", panels, "micro-batches", "accepted tokens/s")


def bars(path: Path, by_data: Mapping[str, Points], names: Sequence[str]) -> None:
    panels = {TITLES[name]: {one: points[one]["accepted"] for one in names} for name, points in by_data.items()}
    plot.bars(path, panels, "accepted tokens/s")
