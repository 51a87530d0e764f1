"""Tables and figures of ALISE's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page

DATA = ("alpaca", "sharegpt")
TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
ORCA, VLLM = "FCFS, as ORCA", "FCFS, as vLLM"
ALISE, FULL = "ALISE, INT8 KV", "ALISE, FP16 KV"
WORSE, KNOWN = "ALISE, INT8 KV, bad predictions", "Oracle, INT8 KV"
DEFER, AGAIN, SWAP, AUTO = "defer", "recompute", "swap", "auto"
#: Abstract and §4.3: throughput relative to vLLM ("up to"), and the reduction of the mean latency of 200 requests in
#: per cent. In the paper's text the other numbers are missing.
PAPER_THROUGHPUT = {"alpaca": 1.8, "sharegpt": 2.1}
PAPER_LATENCY = 46.0


def at_latency(points: Mapping[str, float], limit: float) -> float | None:
    """The rate at which the normalised latency reaches `limit`, interpolating its logarithm linearly between points;
    None if it never does or exceeds it at the lowest rate."""
    rates = sorted(map(float, points))
    values = [points[key] for key in sorted(points, key=float)]
    for (r0, v0), (r1, v1) in zip(
        zip(rates, values, strict=True), zip(rates[1:], values[1:], strict=True), strict=False
    ):
        if v0 <= limit < v1:
            return r0 + (r1 - r0) * log(limit / v0) / log(v1 / v0)
    return None


def normalised(curve: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {rate: point["normalised"] for rate, point in curve.items()}


def reduction(own: float, base: float) -> float:
    return 100 * (1 - own / base)


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    rows = []
    for data in DATA:
        paper, cells = page.times(PAPER_THROUGHPUT[data]), ["–"] * 4
        if simulated:
            found = throughputs(simulated["curves"]["Fig. 6"][data], simulated["limit"])
            cells = [page.times(ratio(found[name], found[VLLM])) for name in (FULL, ALISE, WORSE, KNOWN)]
        rows.append([f"throughput at equal latency (Fig. 6), {TITLES[data]}", paper, *cells, "–", "–"])
    cells = ["–"] * 4
    if simulated:
        systems = simulated["latency"]["systems"]
        base = float(np.mean(systems[VLLM]["sample"]))
        gains = [reduction(float(np.mean(systems[n]["sample"])), base) if n in systems else None
                 for n in (FULL, ALISE, WORSE, KNOWN)]  # fmt: skip
        cells = [page.percent(value) for value in gains]
    for data in ("sharegpt", "alpaca"):
        paper = page.percent(PAPER_LATENCY) if data == "sharegpt" else "–"
        here = cells if data == "sharegpt" else ["–"] * 4
        rows.append(
            [f"mean response latency reduction (Fig. 9), {TITLES[data]}", paper, *here]
            + [page.spread(turns_gain(engine, data, name, "jct")) for name in (SWAP, KNOWN)]
        )
    for data in DATA:
        rows.append(
            [f"normalised latency reduction, {TITLES[data]}", "–", *["–"] * 4]
            + [page.spread(turns_gain(engine, data, name, "normalised")) for name in (SWAP, KNOWN)]
        )
    header = [f"relative to {VLLM}", "paper", *(f"simulated: {name}" for name in (FULL, ALISE, WORSE, KNOWN))]
    out = {"summary": page.table([*header, "engine: swap", "engine: Oracle"], rows)}
    if simulated:
        out |= simulated_sections(simulated)
    if engine:
        out["engine"] = engine_section(engine)
    return out


def throughputs(curves: Mapping[str, Mapping[str, Mapping[str, float]]], limit: float) -> dict[str, float | None]:
    """Requests per second at which the normalised latency reaches `limit`."""
    return {name: at_latency(normalised(curve), limit) for name, curve in curves.items()}


def ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own and base else None


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    out, rows = {}, []
    for data in DATA:
        curves = simulated["curves"]["Fig. 6"][data]
        for limit in (0.1, simulated["limit"], 0.4):
            found = throughputs(curves, limit)
            cells = [f"{value:.2f}" if value else "–" for value in found.values()]
            gains = [page.times(ratio(found[ALISE], found[base])) for base in (VLLM, ORCA)]
            rows.append([f"{TITLES[data]}, {1e3 * limit:.0f} ms/token", *cells, *gains])
    names = list(simulated["curves"]["Fig. 6"]["alpaca"])
    header = ["requests/s at a normalised latency (Fig. 6)", *names]
    out["throughput"] = page.table([*header, f"{ALISE} / {VLLM}", f"{ALISE} / {ORCA}"], rows)

    rows = []
    for data in DATA:
        curves = simulated["curves"]["Fig. 8"][data]
        for rate in sorted({rate for curve in curves.values() for rate in curve}, key=float):
            points = {name: curve.get(rate) for name, curve in curves.items()}
            cells = [f"{1e3 * p['normalised']:.1f}" if p else "–" for p in points.values()]
            recompute, swap = points[AGAIN], points[SWAP]
            extra = [page.percent(100 * recompute["recomputed"] if recompute else None)]
            extra.append(f"{swap['swaps']:.2f}" if swap else "–")
            extra.append(page.percent(100 * swap["stalled"] if swap else None))
            rows.append([f"{TITLES[data]}, {rate}/s", *cells, *extra])
    header = ["normalised latency, ms/token (Fig. 8)", DEFER, AGAIN, SWAP, AUTO, "tokens recomputed (recompute)"]
    out["memory"] = page.table([*header, "swaps per request (swap)", "time waiting for transfers (swap)"], rows)

    latency, rows = simulated["latency"], []
    base = latency["systems"][VLLM]
    for name, found in latency["systems"].items():
        latencies, reference = np.array(found["sample"]), np.array(base["sample"])
        gains = reduction(latencies.mean(), reference.mean()), 100 * float((latencies < reference).mean())
        cells = [f"{value:.1f}" for value in (latencies.mean(), np.median(latencies), np.percentile(latencies, 99))]
        gains = (*gains, reduction(found["mean"], base["mean"]))
        rows.append([name, *cells, *map(page.percent, gains)])
    header = [
        f"ShareGPT at {latency['rate']:.2f}/s (Fig. 9)",
        "mean of 200, s",
        "median",
        "p99",
        "reduction of the mean",
    ]
    out["latency"] = page.table([*header, "requests faster than with FCFS", "reduction, whole trace"], rows)
    return out


def turns_gain(engine: Mapping[str, Any] | None, data: str, name: str, what: str) -> list[float] | None:
    """Reduction relative to FCFS in per cent, per turn."""
    if engine is None:
        return None
    found = engine["systems"][data]
    return [reduction(value, base) for value, base in zip(found[name][what], found[VLLM][what], strict=True)]


def engine_section(engine: Mapping[str, Any]) -> str:
    rows = []
    for data, systems in engine["systems"].items():
        for name, found in systems.items():
            cells = [f"{1e3 * np.median(found['normalised']):.1f}", f"{np.median(found['jct']):.2f}"]
            gains = [
                page.spread(turns_gain(engine, data, name, what)) if name != VLLM else "–"
                for what in ("normalised", "jct")
            ]
            working = np.median(found["working_set"]) / engine["kv"]
            rows.append([TITLES[data], name, *cells, *gains, str(found["preemptions"]), f"{working:.1f}"])
    header = ["engine", "system", "normalised latency, ms/token", "mean latency, s", "reduction: normalised latency"]
    return page.table([*header, "reduction: mean latency", "preemptions, all turns", "working set / pool size"], rows)


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 6, 8 and 9 as PNG files next to the page."""
    for figure, name in (("Fig. 6", "rate"), ("Fig. 8", "memory")):
        panels = {
            TITLES[data]: {
                system: [(float(rate), 1e3 * point["normalised"]) for rate, point in curve.items()]
                for system, curve in simulated["curves"][figure][data].items()
            }
            for data in DATA
        }
        plot.curves(out / f"alise_{name}.png", panels, "requests/s", "normalised latency, ms/token", top=600)
    systems = simulated["latency"]["systems"]
    shown: dict[str, Sequence[tuple[float, float]]] = {
        name: list(enumerate(map(float, systems[name]["sample"]))) for name in (VLLM, ALISE)
    }
    plot.curves(out / "alise_latency.png", {"ShareGPT": shown}, "request, by arrival", "response latency, s")
