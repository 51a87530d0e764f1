"""Tables and figures of SPIN's simulated experiments, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers.spin import systems
from jaxspec.bench.papers.spin.difficulty import BEST_FOR_ALL, BEST_WITH_265M, SSMS, WORST_FOR_ALL
from jaxspec.bench.papers.spin.simulation import BATCHES, LBSS_SETTINGS, LLM, PARTS
from jaxspec.bench.papers.spin.systems import CHOICES, LEARNED, ORACLE, SPIN, SYSTEMS, TOGETHER, UNPACKED, UNPIPED
from jaxspec.bench.table import TIMES, each, markdown, walk

TITLES = {"alpaca": "Alpaca", "cp": "CP", "cip": "CIP", "mix": "Mix"}
#: §VI-B1, LLaMA-7B: SPIN's goodput relative to the baselines on Alpaca; on CP with each component added.
PAPER_ALPACA, PAPER_CP = 2.34, {UNPACKED: 1.45, UNPIPED: 1.81, SPIN: 1.99}
#: §VI-B2, Alpaca, LLaMA-7B: accepted tokens per second.
PAPER_CHOICES = {systems.GREEDY: "32.21", "ε-greedy": "43.78", LEARNED: "65.31"}

Point = Mapping[str, float]
Points = Mapping[str, Point]


def gains(points: Points, name: str) -> str:
    """Ratios of the goodput to the best, the mean and the worst single draft model."""
    bases = [points[ssm]["accepted"] for ssm in SSMS]
    own = points[name]["accepted"]
    return " / ".join(f"{own / base:.2f}" for base in (max(bases), float(np.mean(bases)), min(bases)))


def sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    """Markdown tables by name."""
    parts = each((parts or "heuristic" for parts in PARTS), TIMES)
    return {
        "simulated summary": summary(simulated),
        "simulated facts": facts(simulated),
        **{f"simulated goodput {kind}": goodputs(found) for kind, found in simulated["goodput"].items()},
        "simulated selection": markdown(
            (
                [llm, name, PAPER_CHOICES.get(name) if llm == LLM else None, *(own[name] for own in by_data.values())]
                for llm, by_data in simulated["selection"].items() for name in CHOICES
            ),
            "accepted tokens per second (all tokens per second of the slots' own time, without waiting)",
            "draft choice", "paper: Alpaca", *each(TITLES.values(), with_own),
        ),
        "simulated verification": markdown(
            ([TITLES[data], kind, *sizes.values()] for data, kind, sizes in walk(simulated["verification"], 2)),
            "ms per verification (peak GB of KV), by batch size", "",
            *each(BATCHES, lambda own: f"{own['ms']:.0f} ({own['gigabytes']:.1f})"),
        ),
        "simulated speedup": markdown(
            (
                [kind, how, ssm, *(own[ssm] / own["none"] for own in sizes.values())]
                for kind, how, sizes in walk(simulated["speedup"], 2) for ssm in ("68M", "1.1B")
            ),
            "Alpaca, speedup over no drafts, by batch size", "", "draft model", *each(BATCHES, TIMES),
        ),
        "simulated pipeline": markdown(
            (
                [f"{TITLES[data]}, {concurrency} requests", kind]
                + [found[str(parts)]["accepted"] / found["1"]["accepted"] for parts in PARTS]
                for concurrency, data, kind, found in walk(simulated["pipeline"], 3)
            ),
            "goodput relative to one micro-batch", "", *parts,
        ),
        "simulated residual": residual(simulated["residual"]),
        "simulated lbss": lbss(simulated["settings"]),
    }  # fmt: skip


def with_own(point: Point) -> str:
    return f"{point['accepted']:.1f}" + (f" ({point['own']:.1f})" if "own" in point else "")


def summary(simulated: Mapping[str, Any]) -> str:
    """The numbers that the paper's text gives."""
    both = [simulated["goodput"][kind][LLM] for kind in ("as measured", "roofline")]
    alpaca, latency = both[0]["alpaca"], simulated["verification"]["alpaca"]
    rows: list[Sequence[Any]] = [
        [title, paper and f"{paper}×", *(gains(found[data], name) for found in both)]
        for title, paper, data, name in (
            ("SPIN relative to other baselines, Alpaca (Fig. 10)", PAPER_ALPACA, "alpaca", SPIN),
            ("SPIN relative to other baselines, CP (Fig. 10)", PAPER_CP[SPIN], "cp", SPIN),
            (f"{UNPACKED} relative to baselines, CP", PAPER_CP[UNPACKED], "cp", UNPACKED),
            (f"{UNPIPED} relative to baselines, CP", PAPER_CP[UNPIPED], "cp", UNPIPED),
            ("jaxspec relative to baselines, Alpaca", None, "alpaca", systems.OURS),
            ("jaxspec relative to baselines, CP", None, "cp", systems.OURS),
        )
    ]
    rows += [
        [title, paper, found, None]
        for title, paper, found in (
            ("68M for all, Alpaca, tokens/s (used to fit the acceptance rates)", f"{systems.VANILLA_68M}",
             f"{alpaca['68M']['accepted']:.1f}"),
            (f"{UNPACKED}, Alpaca, tokens/s", f"{systems.CHOICE_ALONE}", f"{alpaca[UNPACKED]['accepted']:.1f}"),
            *((f"verification of 16, {name}, Alpaca, ms (used to fit the times)", f"{1e3 * paper:.0f}",
               f"{latency[name]['16']['ms']:.0f}")
              for name, paper in (("padded", systems.VERIFIED_PADDED), ("packed", systems.VERIFIED_PACKED))),
        )
    ]  # fmt: skip
    for kind, name in (("steps", "within a step, as the engine"), ("flowing", "across steps")):
        found = {parts: own["accepted"] for parts, own in simulated["pipeline"]["8"]["alpaca"][kind].items()}
        best = max((parts for parts in found if parts != "None"), key=found.__getitem__)
        title = f"best number of micro-batches, Alpaca, {name} (Fig. 13)"
        rows.append([title, "5; with 4 1.29×", f"{best}; {found[best] / found['1']:.2f}×", None])
    alone = [simulated["speedup"][kind]["padded"]["1"] for kind in ("as measured", "roofline")]
    cells = [" / ".join(f"{one[name] / one['none']:.2f}×" for name in ("68M", "1.1B")) for one in alone]
    rows.append(["speedup of speculation with 68M / 1.1B, one request (Fig. 4)", "1.61×", *cells])
    header = "relative to best / mean / worst single draft model"
    return markdown(rows, header, "paper", "as measured by the paper", "roofline")


def facts(simulated: Mapping[str, Any]) -> str:
    """Published facts about the requests, next to those of the simulated ones."""
    found, points = simulated["facts"], simulated["goodput"]["as measured"][LLM]
    in_order = lambda names: " and ".join(sorted(names, key=SSMS.index))  # noqa: E731
    rows = []
    for name, title in TITLES.items():
        by_speed = sorted(SSMS, key=lambda ssm: -points[name][ssm]["accepted"])
        shares = " / ".join(f"{100 * share:.0f}" for share in found[name]["best"])
        rates = " / ".join(f"{rate:.2f}" for rate in found[name]["rates"])
        best = BEST_WITH_265M.get(name), shares, BEST_FOR_ALL.get(name), by_speed[0]
        rows.append([title, *best, in_order(by_speed[-2:]), rates])
    return markdown(
        rows, f"({' / '.join(SSMS)})", ("paper: best served with 265M", lambda share: f"{100 * share:.0f} %"),
        "model: best served, %", "paper: best for all", "simulated",
        f"simulated: two worst (paper: {in_order(WORST_FOR_ALL)})", "model: mean rates",
    )  # fmt: skip


def goodputs(by_llm: Mapping[str, Mapping[str, Points]]) -> str:
    return markdown(
        ([llm, name, *(own[name] for own in data.values())] for llm, data in by_llm.items() for name in SYSTEMS),
        "accepted / all tokens per second", "system",
        *each(TITLES.values(), lambda point: f"{point['accepted']:.1f} / {point['tokens']:.1f}"),
    )  # fmt: skip


def residual(by_spread: Mapping[str, Points]) -> str:
    rows = []
    for spread, points in by_spread.items():
        best = max(points[ssm]["accepted"] for ssm in SSMS)
        speeds = [points[name]["accepted"] for name in (LEARNED, ORACLE, TOGETHER)]
        cells = [f"{speed:.1f} ({speed / best:.2f}×)" for speed in speeds]
        rows.append([spread, best, *cells, points[LEARNED]["own"] / points[ORACLE]["own"]])
    return markdown(
        rows, "σ of the residual, in logits", ("best single draft model", "{:.1f}"), LEARNED, ORACLE, TOGETHER,
        ("LBSS / oracle, slots' own time", "{:.2f}"),
    )  # fmt: skip


def lbss(by_answer: Mapping[str, Any]) -> str:
    def relative(point: Point, oracle: Point) -> str:
        return f"{point['tokens'] / oracle['tokens']:.2f} / {point['own'] / oracle['own']:.2f}"

    rows = []
    for i, own in enumerate(LBSS_SETTINGS):
        title = f"α {own['exploration']}, β {own['chunk']}" + ("" if own.get("prior", True) else ", no prior")
        title += f", {own['prior_slots']:g} prior slots" if "prior_slots" in own else ""
        title += f", from epoch {own['prior_epoch']}" if "prior_epoch" in own else ""
        rows.append([title, *(relative(found["settings"][i], found[ORACLE]) for found in by_answer.values())])
    for name in (TOGETHER, *SSMS):
        title = name if name == TOGETHER else f"{name} for all"
        rows.append([title, *(relative(found[name], found[ORACLE]) for found in by_answer.values())])
    header = "all tokens per second relative to the oracle / the same over the slots' own time"
    return markdown(rows, header, *(f"{n} tokens" for n in by_answer))


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 10, 11 and 13 as PNG files next to the page. Raises `BenchError`."""
    for name, by_data, names in (
        ("goodput", simulated["goodput"]["as measured"], SYSTEMS), ("selection", simulated["selection"], CHOICES),
    ):  # fmt: skip
        heights = {TITLES[data]: {n: points[n]["accepted"] for n in names} for data, points in by_data[LLM].items()}
        plot.bars(out / f"spin_{name}.png", heights, "accepted tokens/s")
    panels: dict[str, dict[str, plot.Curve]] = {}
    for concurrency, data, kind, found in walk(simulated["pipeline"], 3):
        curve = {parts: own["accepted"] for parts, own in found.items() if parts != "None"}
        panels.setdefault(f"{TITLES[data]}, {concurrency} requests", {})[kind] = curve
    plot.curves(out / "spin_simulated_pipeline.png", panels, "micro-batches", "accepted tokens/s")
