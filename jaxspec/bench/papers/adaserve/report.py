"""The tables and figures of AdaServe's page, beside what the paper says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.adaserve.systems import BASELINES, EQUAL, FCFS, GLOBAL, OURS, PAPER, STTA, UNCALIBRATED

TITLES = {"llama-2-7b": "Llama-2-7b", "llama-2-70b": "Llama-2-70b"}
#: §6.2, "up to", as a multiple of the best baseline's: attainment, goodput.
PAPER_GAINS = {"llama-2-7b": (1.63, 1.51), "llama-2-70b": (1.73, 1.74)}
#: Fig. 10 by §6.3: attainment in per cent with targets of so many times the baseline latency.
PAPER_STRICTER = {"0.8": 95.0, "0.6": 60.0}
SHOWN = (PAPER, UNCALIBRATED, OURS)

#: By system and rate.
Points = Mapping[str, Mapping[str, Mapping[str, float]]]


def best_gain(points: Points, name: str, what: str, bases: Sequence[str] = BASELINES) -> tuple[float, str] | None:
    """The largest multiple of the best baseline's over the rates, and the rate; None where nobody has anything."""
    gains = []
    for rate, own in points[name].items():
        base = max(points[b][rate][what] for b in bases)
        if base > 0:
            gains.append((own[what] / base, rate))
    return max(gains, default=None)


def shown(gain: tuple[float, str] | None) -> str:
    return "–" if gain is None else f"{gain[0]:.2f}× ({gain[1]}/s)"


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables, of what has been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    rows = []
    for model, gains in PAPER_GAINS.items():
        for what, figure, paper in zip(("attainment", "goodput"), (4, 5), gains, strict=True):
            cells = ["–"] * len(SHOWN)
            if simulated:
                cells = [shown(best_gain(simulated["by_rate"][model], name, what)) for name in SHOWN]
            here = [engine_gain(engine, name, what) if model == "llama-2-7b" else "–" for name in (PAPER, OURS)]
            title = f"{what} of the best baseline, up to (Fig. {figure}), {TITLES[model]}"
            rows.append([title, page.times(paper), *cells, *here])
    for bases, figure, model in (((FCFS, STTA), 7, "llama-2-70b"), ((EQUAL, GLOBAL), 8, "llama-2-7b")):
        cells = ["–"] * len(SHOWN)
        if simulated:
            cells = [shown(best_gain(simulated["by_rate"][model], name, "attainment", bases)) for name in SHOWN]
        here = [engine_gain(engine, name, "attainment", bases) for name in (PAPER, OURS)]
        rows.append(
            [f"attainment of {' and '.join(bases)}, up to (Fig. {figure}), {TITLES[model]}", "more", *cells, *here]
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
        title = f"least attainment, whatever the share of strict requests (Fig. 6), {TITLES[model]}"
        rows.append([title, "“nearly 100 %”", *cells, "–", "–"])
    for scale, paper in PAPER_STRICTER.items():
        cells = ["–"] * len(SHOWN)
        if simulated:
            systems = simulated["stricter"]["systems"]
            cells = [page.percent(100 * systems[name][scale]["attainment"]) for name in SHOWN]
        here = [light(engine, name) if scale == "0.8" else "–" for name in (PAPER, OURS)]
        rows.append([f"attainment at {scale} × baseline latency (Fig. 10)", page.percent(paper), *cells, *here])
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
            ("attainment", "targets kept, per cent", lambda p: f"{100 * p['attainment']:.1f}"),
            ("goodput", "goodput, tokens/s", lambda p: f"{p['goodput']:.0f}"),
            ("ttft", "mean time to first token, s", lambda p: f"{p['ttft']:.2f}"),
        ):
            rows = [[name, *(value(points[rate]) for rate in rates)] for name, points in by_rate[model].items()]
            out[f"{what} {model}"] = page.table([f"{title}: {unit}, by requests/s", *rates], rows)
    rows = []
    for model, title in TITLES.items():
        for rate, systems in simulated["by_share"][model].items():
            for name, points in systems.items():
                cells = [f"{100 * p['attainment']:.1f}" for p in points.values()]
                rows.append([f"{title}, {rate}/s", name, *cells])
    shares = [f"{100 * float(s):.0f} %" for s in next(iter(systems.values()))]
    out["strict"] = page.table(["targets kept, per cent, by strict requests (Fig. 6)", "system", *shares], rows)
    stricter = simulated["stricter"]
    rows = [
        [name, *(f"{100 * p['attainment']:.1f}" for p in points.values())]
        for name, points in stricter["systems"].items()
    ]
    scales = [f"{scale} ×" for scale in stricter["systems"][PAPER]]
    header = f"targets kept, per cent, by target ({TITLES['llama-2-70b']}, {stricter['rate']}/s, Fig. 10)"
    out["stricter"] = page.table([header, *scales], rows)
    rows = []
    for name, parts in simulated["breakdown"].items():
        total = sum(parts.values())
        rows.append([name, *(f"{ms:.2f}" for ms in parts.values()), page.percent(100 * parts["selection"] / total)])
    header = ["ms of an iteration (Fig. 9)", "selection, measured here", "drafter", "target", "selection's share"]
    out["breakdown"] = page.table(header, rows)
    return out


# --- the engine's -----------------------------------------------------------------------------------------------------


def ratios(systems: Mapping[str, Any], name: str, what: str, bases: Sequence[str]) -> list[float]:
    """Turn by turn, as a multiple of the best of these; turns in which those have nothing are left out."""
    there = [systems[b][what] for b in bases if b in systems]
    if name not in systems or not there:
        return []
    best = [max(turn) for turn in zip(*there, strict=True)]
    return [own / base for own, base in zip(systems[name][what], best, strict=True) if base > 0]


def engine_gain(
    engine: Mapping[str, Any] | None, name: str, what: str, bases: Sequence[str] = BASELINES
) -> str:  # fmt: skip
    """The largest median over the rates, with the range of its turns."""
    found = [ratios(systems, name, what, bases) for systems in engine["rates"].values()] if engine else []
    best = max((turns for turns in found if turns), key=lambda turns: float(np.median(turns)), default=None)
    return page.spread(best, "{:.2f}×", "{:.2f}")


def light(engine: Mapping[str, Any] | None, name: str) -> str:
    if engine is None or name not in engine["light"]["systems"]:
        return "–"
    return page.spread([100 * share for share in engine["light"]["systems"][name]["attainment"]], "{:.0f} %")


def engine_section(engine: Mapping[str, Any]) -> str:
    rows = []
    quiet = {f"light load, {engine['light']['rate']:.2f}/s, strict targets × 0.8": engine["light"]["systems"]}
    loads = {f"{float(rate):.2f}/s": systems for rate, systems in engine["rates"].items()}
    for title, systems in {**loads, **quiet}.items():
        for name, found in systems.items():
            cells = [page.spread([100 * share for share in found["attainment"]], "{:.0f} %")]
            cells += [page.spread(found[what], "{:.0f}") for what in ("goodput", "throughput")]
            rows.append([title, name, *cells, f"{np.median(found['ttft']):.2f}"])
    header = ["engine", "system", "targets kept", "goodput, tokens/s", "all tokens/s", "mean time to first token, s"]
    targets = ", ".join(f"{1e3 * t:.1f}" for t in engine["targets"])
    return page.table(header, rows) + f"\n\nTargets: {targets} ms; {engine['jobs']} requests a turn."


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Figures 4 to 8 and 10 as PNG files beside the page."""
    by_rate = simulated["by_rate"]

    def lines(model: str, names: Sequence[str], what: str, factor: float) -> dict[str, list[tuple[float, float]]]:
        return {n: [(float(r), factor * p[what]) for r, p in by_rate[model][n].items()] for n in names}

    main = (*BASELINES, PAPER, OURS)
    for what, label, factor in (("attainment", "targets kept, %", 100.0), ("goodput", "goodput, tokens/s", 1.0)):
        panels = {TITLES[model]: lines(model, main, what, factor) for model in TITLES}
        plot.curves(out / f"adaserve_{what}.png", panels, "requests a second", label)
    panels = {
        f"{TITLES['llama-2-70b']} (Fig. 7)": lines("llama-2-70b", (FCFS, STTA, PAPER, OURS), "attainment", 100),
        f"{TITLES['llama-2-7b']} (Fig. 8)": lines("llama-2-7b", (EQUAL, GLOBAL, *SHOWN), "attainment", 100),
    }
    plot.curves(out / "adaserve_ablation.png", panels, "requests a second", "targets kept, %")
    panels = {
        f"{TITLES[model]}, {rate}/s": {
            name: [(100 * float(s), 100 * p["attainment"]) for s, p in points.items()]
            for name, points in systems.items()
        }
        for model in TITLES
        for rate, systems in simulated["by_share"][model].items()
    }
    plot.curves(out / "adaserve_strict.png", panels, "strict requests, %", "targets kept, %")
    found = {
        name: [(float(s), 100 * p["attainment"]) for s, p in points.items()]
        for name, points in simulated["stricter"]["systems"].items()
    }
    plot.curves(
        out / "adaserve_stricter.png", {TITLES["llama-2-70b"]: found}, "target by baseline latency", "targets kept, %"
    )
