"""Tables and figures of AdaServe's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.adaserve.systems import BASELINES, EQUAL, FCFS, GLOBAL, OURS, PAPER, STTA, UNCALIBRATED

TITLES = {"llama-2-7b": "Llama-2-7b", "llama-2-70b": "Llama-2-70b"}
#: §6.2, "up to", relative to the best baseline: (attainment, goodput).
PAPER_GAINS = {"llama-2-7b": (1.63, 1.51), "llama-2-70b": (1.73, 1.74)}
#: Fig. 10 and §6.3: SLO attainment in per cent by strict SLO, as a multiple of the baseline latency.
PAPER_STRICTER = {"0.8": 95.0, "0.6": 60.0}
SHOWN = (PAPER, UNCALIBRATED, OURS)
LABELS = {"attainment": "SLO attainment", "goodput": "goodput"}
ATTAINMENT = "SLO attainment, %"

#: Measurements by system and rate.
Points = Mapping[str, Mapping[str, Mapping[str, float]]]


def best_gain(points: Points, name: str, what: str, bases: Sequence[str] = BASELINES) -> tuple[float, str] | None:
    """(largest ratio to the best baseline over all rates, its rate); None if the baselines are 0 at every rate."""
    gains = []
    for rate, point in points[name].items():
        base = max(points[b][rate][what] for b in bases)
        if base > 0:
            gains.append((point[what] / base, rate))
    return max(gains, default=None)


def shown(gain: tuple[float, str] | None) -> str:
    return "–" if gain is None else f"{gain[0]:.2f}× ({gain[1]}/s)"


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    rows = []
    for model, gains in PAPER_GAINS.items():
        for what, figure, paper in zip(("attainment", "goodput"), (4, 5), gains, strict=True):
            cells = ["–"] * len(SHOWN)
            if simulated:
                cells = [shown(best_gain(simulated["by_rate"][model], name, what)) for name in SHOWN]
            here = [engine_gain(engine, name, what) if model == "llama-2-7b" else "–" for name in (PAPER, OURS)]
            title = f"{LABELS[what]} relative to the best baseline, up to (Fig. {figure}), {TITLES[model]}"
            rows.append([title, page.times(paper), *cells, *here])
    for bases, figure, model in (((FCFS, STTA), 7, "llama-2-70b"), ((EQUAL, GLOBAL), 8, "llama-2-7b")):
        cells = ["–"] * len(SHOWN)
        if simulated:
            cells = [shown(best_gain(simulated["by_rate"][model], name, "attainment", bases)) for name in SHOWN]
        here = [engine_gain(engine, name, "attainment", bases) for name in (PAPER, OURS)]
        rows.append(
            [
                f"SLO attainment relative to {' and '.join(bases)}, up to (Fig. {figure}), {TITLES[model]}",
                "higher",
                *cells,
                *here,
            ]
        )
    for model in TITLES:
        cells = ["–"] * len(SHOWN)
        if simulated:
            rate = next(iter(simulated["by_share"][model]))
            found = simulated["by_share"][model][rate]
            cells = [
                page.percent(100 * min(p["attainment"] for p in found[n].values())) if n in found else "–"
                for n in SHOWN
            ]
        title = f"lowest SLO attainment over the shares of strict requests (Fig. 6), {TITLES[model]}"
        rows.append([title, "“nearly 100 %”", *cells, "–", "–"])
    for scale, paper in PAPER_STRICTER.items():
        cells = ["–"] * len(SHOWN)
        if simulated:
            systems = simulated["stricter"]["systems"]
            cells = [page.percent(100 * systems[name][scale]["attainment"]) for name in SHOWN]
        here = [light(engine, name) if scale == "0.8" else "–" for name in (PAPER, OURS)]
        rows.append([f"SLO attainment at {scale} × baseline latency (Fig. 10)", page.percent(paper), *cells, *here])
    header = ["", "paper", *(f"simulated: {name}" for name in SHOWN), f"engine: {PAPER}", f"engine: {OURS}"]
    out = {"summary": page.table(header, rows)}
    if simulated:
        out |= simulated_sections(simulated)
    if engine:
        out["engine"] = engine_section(engine)
    return out


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    by_rate, out = simulated["by_rate"], {}
    for model, title in TITLES.items():
        rates = list(by_rate[model][PAPER])
        for what, unit, value in (
            ("attainment", "SLO attainment, %", lambda p: f"{100 * p['attainment']:.1f}"),
            ("goodput", "goodput, tokens/s", lambda p: f"{p['goodput']:.0f}"),
            ("ttft", "mean TTFT, s", lambda p: f"{p['ttft']:.2f}"),
        ):
            rows = [[name, *(value(points[rate]) for rate in rates)] for name, points in by_rate[model].items()]
            out[f"{what} {model}"] = page.table([f"{title}: {unit}, by requests/s", *rates], rows)
    rows, shares = [], []
    for model, title in TITLES.items():
        for rate, systems in simulated["by_share"][model].items():
            for name, points in systems.items():
                cells = [f"{100 * p['attainment']:.1f}" for p in points.values()]
                rows.append([f"{title}, {rate}/s", name, *cells])
                shares = [f"{100 * float(s):.0f} %" for s in points]
    out["strict"] = page.table(["SLO attainment, %, by share of strict requests (Fig. 6)", "system", *shares], rows)
    stricter = simulated["stricter"]
    rows = [
        [name, *(f"{100 * p['attainment']:.1f}" for p in points.values())]
        for name, points in stricter["systems"].items()
    ]
    scales = [f"{scale} ×" for scale in stricter["systems"][PAPER]]
    header = f"SLO attainment, %, by SLO / baseline latency ({TITLES['llama-2-70b']}, {stricter['rate']}/s, Fig. 10)"
    out["stricter"] = page.table([header, *scales], rows)
    rows = []
    for name, parts in simulated["breakdown"].items():
        total = sum(parts.values())
        rows.append([name, *(f"{ms:.2f}" for ms in parts.values()), page.percent(100 * parts["selection"] / total)])
    header = ["ms per step (Fig. 9)", "selection, measured here", "drafter", "target model", "selection's share"]
    out["breakdown"] = page.table(header, rows)
    return out


# --- on the engine ----------------------------------------------------------------------------------------------------


def ratios(systems: Mapping[str, Any], name: str, what: str, bases: Sequence[str]) -> list[float]:
    """Per turn, the ratio to the best of `bases`; turns in which all of those are 0 are skipped."""
    measured = [systems[b][what] for b in bases if b in systems]
    if name not in systems or not measured:
        return []
    best = [max(turn) for turn in zip(*measured, strict=True)]
    return [value / base for value, base in zip(systems[name][what], best, strict=True) if base > 0]


def engine_gain(
    engine: Mapping[str, Any] | None, name: str, what: str, bases: Sequence[str] = BASELINES
) -> str:  # fmt: skip
    """The largest median ratio over the rates, with the range over its turns."""
    found = [ratios(systems, name, what, bases) for systems in engine["rates"].values()] if engine else []
    best = max((turns for turns in found if turns), key=lambda turns: float(np.median(turns)), default=None)
    return page.spread(best, "{:.2f}×", "{:.2f}")


def light(engine: Mapping[str, Any] | None, name: str) -> str:
    if engine is None or name not in engine["light"]["systems"]:
        return "–"
    return page.spread([100 * share for share in engine["light"]["systems"][name]["attainment"]], "{:.0f} %")


def engine_section(engine: Mapping[str, Any]) -> str:
    rows = []
    quiet = {f"light load, {engine['light']['rate']:.2f}/s, strict SLO × 0.8": engine["light"]["systems"]}
    loads = {f"{float(rate):.2f}/s": systems for rate, systems in engine["rates"].items()}
    for title, systems in {**loads, **quiet}.items():
        for name, found in systems.items():
            cells = [page.spread([100 * share for share in found["attainment"]], "{:.0f} %")]
            cells += [page.spread(found[what], "{:.0f}") for what in ("goodput", "throughput")]
            rows.append([title, name, *cells, f"{np.median(found['ttft']):.2f}"])
    header = ["engine", "system", "SLO attainment", "goodput, tokens/s", "throughput, tokens/s", "mean TTFT, s"]
    slos = ", ".join(f"{1e3 * t:.1f}" for t in engine["targets"])
    return page.table(header, rows) + f"\n\nTPOT SLOs: {slos} ms; {engine['jobs']} requests per turn."


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 4 to 8 and 10 as PNG files next to the page."""
    by_rate = simulated["by_rate"]

    def lines(model: str, names: Sequence[str], what: str, factor: float) -> dict[str, list[tuple[float, float]]]:
        return {n: [(float(r), factor * p[what]) for r, p in by_rate[model][n].items()] for n in names}

    main = (*BASELINES, PAPER, OURS)
    for what, label, factor in (("attainment", ATTAINMENT, 100.0), ("goodput", "goodput, tokens/s", 1.0)):
        panels = {TITLES[model]: lines(model, main, what, factor) for model in TITLES}
        plot.curves(out / f"adaserve_{what}.png", panels, "requests/s", label)
    panels = {
        f"{TITLES['llama-2-70b']} (Fig. 7)": lines("llama-2-70b", (FCFS, STTA, PAPER, OURS), "attainment", 100),
        f"{TITLES['llama-2-7b']} (Fig. 8)": lines("llama-2-7b", (EQUAL, GLOBAL, *SHOWN), "attainment", 100),
    }
    plot.curves(out / "adaserve_ablation.png", panels, "requests/s", ATTAINMENT)
    panels = {
        f"{TITLES[model]}, {rate}/s": {
            name: [(100 * float(s), 100 * p["attainment"]) for s, p in points.items()]
            for name, points in systems.items()
        }
        for model in TITLES
        for rate, systems in simulated["by_share"][model].items()
    }
    plot.curves(out / "adaserve_strict.png", panels, "strict requests, %", ATTAINMENT)
    found = {
        name: [(float(s), 100 * p["attainment"]) for s, p in points.items()]
        for name, points in simulated["stricter"]["systems"].items()
    }
    plot.curves(out / "adaserve_stricter.png", {TITLES["llama-2-70b"]: found}, "SLO / baseline latency", ATTAINMENT)
