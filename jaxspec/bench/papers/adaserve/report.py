"""Tables and figures of AdaServe's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot, table
from jaxspec.bench.papers.adaserve.systems import BASELINES, EQUAL, FCFS, GLOBAL, OURS, PAPER, STTA, UNCALIBRATED
from jaxspec.bench.table import PERCENT, TIMES, UNKNOWN, at, each, share, spread, walk

TITLES = {"llama-2-7b": "Llama-2-7b", "llama-2-70b": "Llama-2-70b"}
#: §6.2, "up to", relative to the best baseline: (attainment, goodput).
PAPER_GAINS = {"llama-2-7b": (1.63, 1.51), "llama-2-70b": (1.73, 1.74)}
#: Fig. 10 and §6.3: SLO attainment in per cent by strict SLO, as a multiple of the baseline latency.
PAPER_STRICTER = {"0.8": 95.0, "0.6": 60.0}
SHOWN, MEASURED = (PAPER, UNCALIBRATED, OURS), (PAPER, OURS)
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
    return UNKNOWN if gain is None else f"{gain[0]:.2f}× ({gain[1]}/s)"


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    out = {"summary": summary(simulated, engine)}
    if simulated:
        out |= simulated_sections(simulated)
    if engine:
        out["engine"] = engine_section(engine)
    return out


def summary(simulated: Mapping[str, Any] | None, engine: Mapping[str, Any] | None) -> str:
    def gains(model: str, what: str, bases: Sequence[str], measured: bool = True) -> list[str]:
        points = at(simulated, "by_rate", model)
        here = [shown(best_gain(points, name, what, bases)) if points else UNKNOWN for name in SHOWN]
        return here + [engine_gain(engine if measured else None, name, what, bases) for name in MEASURED]

    rows: list[Sequence[Any]] = []
    for model, papers in PAPER_GAINS.items():
        for (what, label), figure, paper in zip(LABELS.items(), (4, 5), papers, strict=True):
            title = f"{label} relative to the best baseline, up to (Fig. {figure}), {TITLES[model]}"
            rows.append([title, TIMES.format(paper), *gains(model, what, BASELINES, model == "llama-2-7b")])
    for bases, figure, model in (((FCFS, STTA), 7, "llama-2-70b"), ((EQUAL, GLOBAL), 8, "llama-2-7b")):
        title = f"SLO attainment relative to {' and '.join(bases)}, up to (Fig. {figure}), {TITLES[model]}"
        rows.append([title, "higher", *gains(model, "attainment", bases)])
    for model, title in TITLES.items():
        found = next(iter(simulated["by_share"][model].values())) if simulated else {}
        lowest = [share(min(p["attainment"] for p in found[n].values())) if n in found else None for n in SHOWN]
        title = f"lowest SLO attainment over the shares of strict requests (Fig. 6), {title}"
        rows.append([title, "“nearly 100 %”", *lowest, None, None])
    for scale, paper in PAPER_STRICTER.items():
        found = [at(simulated, "stricter", "systems", name, scale, "attainment") for name in SHOWN]
        here = [light(engine, name) if scale == "0.8" else None for name in MEASURED]
        title = f"SLO attainment at {scale} × baseline latency (Fig. 10)"
        rows.append([title, PERCENT.format(paper), *(table.shown(value, share) for value in found), *here])
    systems = [f"simulated: {name}" for name in SHOWN] + [f"engine: {name}" for name in MEASURED]
    return table.markdown(rows, "", "paper", *systems)


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    out: dict[str, str] = {}
    for model, title in TITLES.items():
        by_rate = simulated["by_rate"][model]
        for what, unit, form in (
            ("attainment", ATTAINMENT, hundredths),
            ("goodput", "goodput, tokens/s", "{:.0f}"),
            ("ttft", "mean TTFT, s", "{:.2f}"),
        ):
            rows = [[name, *(point[what] for point in points.values())] for name, points in by_rate.items()]
            header = f"{title}: {unit}, by requests/s"
            out[f"{what} {model}"] = table.markdown(rows, header, *each(by_rate[PAPER], form))
    by_share = list(walk(simulated["by_share"], 3))
    out["strict"] = table.markdown(
        (
            [f"{TITLES[model]}, {rate}/s", name, *(p["attainment"] for p in points.values())]
            for model, rate, name, points in by_share
        ),
        f"{ATTAINMENT}, by share of strict requests (Fig. 6)", "system",
        *each((f"{100 * float(share):.0f} %" for share in by_share[0][-1]), hundredths),
    )  # fmt: skip
    rate, systems = simulated["stricter"]["rate"], simulated["stricter"]["systems"]
    rows = [[name, *(p["attainment"] for p in points.values())] for name, points in systems.items()]
    header = f"{ATTAINMENT}, by SLO / baseline latency ({TITLES['llama-2-70b']}, {rate}/s, Fig. 10)"
    out["stricter"] = table.markdown(rows, header, *each((f"{scale} ×" for scale in systems[PAPER]), hundredths))
    rows = [
        [name, *parts.values(), parts["selection"] / sum(parts.values())]
        for name, parts in simulated["breakdown"].items()
    ]
    parts = each(("selection, measured here", "drafter", "target model"), "{:.2f}")
    out["breakdown"] = table.markdown(rows, "ms per step (Fig. 9)", *parts, ("selection's share", share))
    return out


def hundredths(value: float) -> str:
    return f"{100 * value:.1f}"


# --- on the engine ----------------------------------------------------------------------------------------------------


def ratios(systems: Mapping[str, Any], name: str, what: str, bases: Sequence[str]) -> list[float]:
    """Per turn, the ratio to the best of `bases`; turns in which all of those are 0 are skipped."""
    measured = [systems[b][what] for b in bases if b in systems]
    if name not in systems or not measured:
        return []
    best = [max(turn) for turn in zip(*measured, strict=True)]
    return [value / base for value, base in zip(systems[name][what], best, strict=True) if base > 0]


def engine_gain(engine: Mapping[str, Any] | None, name: str, what: str, bases: Sequence[str] = BASELINES) -> str:
    """The largest median ratio over the rates, with the range over its turns."""
    found = [ratios(systems, name, what, bases) for systems in engine["rates"].values()] if engine else []
    best = max((turns for turns in found if turns), key=lambda turns: float(np.median(turns)), default=None)
    return table.shown(best, spread(TIMES, "{:.2f}"))


def light(engine: Mapping[str, Any] | None, name: str) -> str:
    return table.shown(at(engine, "light", "systems", name, "attainment"), attained)


def attained(turns: Sequence[float]) -> str:
    return table.shown([100 * share for share in turns], spread("{:.0f} %"))


def engine_section(engine: Mapping[str, Any]) -> str:
    loads = {f"{float(rate):.2f}/s": systems for rate, systems in engine["rates"].items()}
    loads[f"light load, {engine['light']['rate']:.2f}/s, strict SLO × 0.8"] = engine["light"]["systems"]
    what = "attainment", "goodput", "throughput", "ttft"
    text = table.markdown(
        ([load, name, *map(found.get, what)] for load, name, found in walk(loads, 2)),
        "engine", "system", ("SLO attainment", attained),
        *each(("goodput, tokens/s", "throughput, tokens/s"), spread("{:.0f}")),
        ("mean TTFT, s", table.median("{:.2f}")),
    )  # fmt: skip
    slos = ", ".join(f"{1e3 * t:.1f}" for t in engine["targets"])
    return f"{text}\n\nTPOT SLOs: {slos} ms; {engine['jobs']} requests per turn."


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 4 to 8 and 10 as PNG files next to the page."""
    by_rate, percent = simulated["by_rate"], lambda point: 100 * point["attainment"]

    def chosen(model: str, *names: str) -> dict[str, plot.Curve]:
        return {name: by_rate[model][name] for name in names}

    panels = {title: chosen(model, *BASELINES, PAPER, OURS) for model, title in TITLES.items()}
    plot.curves(out / "adaserve_attainment.png", panels, "requests/s", ATTAINMENT, percent)
    plot.curves(out / "adaserve_goodput.png", panels, "requests/s", "goodput, tokens/s", itemgetter("goodput"))
    panels = {
        f"{TITLES['llama-2-70b']} (Fig. 7)": chosen("llama-2-70b", FCFS, STTA, PAPER, OURS),
        f"{TITLES['llama-2-7b']} (Fig. 8)": chosen("llama-2-7b", EQUAL, GLOBAL, *SHOWN),
    }
    plot.curves(out / "adaserve_ablation.png", panels, "requests/s", ATTAINMENT, percent)
    panels: dict[str, dict[str, plot.Curve]] = {}
    for model, rate, name, points in walk(simulated["by_share"], 3):
        curve = {100 * float(share): point for share, point in points.items()}
        panels.setdefault(f"{TITLES[model]}, {rate}/s", {})[name] = curve
    plot.curves(out / "adaserve_strict.png", panels, "strict requests, %", ATTAINMENT, percent)
    panels = {TITLES["llama-2-70b"]: simulated["stricter"]["systems"]}
    plot.curves(out / "adaserve_stricter.png", panels, "SLO / baseline latency", ATTAINMENT, percent)
