"""Tables and figures of ALISE's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.table import PERCENT, TIMES, UNKNOWN, at, each, markdown, median, share, shown, spread, walk

TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
DATA = tuple(TITLES)
ORCA, VLLM = "FCFS, as ORCA", "FCFS, as vLLM"
ALISE, FULL = "ALISE, INT8 KV", "ALISE, FP16 KV"
WORSE, KNOWN = "ALISE, INT8 KV, bad predictions", "Oracle, INT8 KV"
#: In the page's first table.
COMPARED = FULL, ALISE, WORSE, KNOWN
MEMORIES = DEFER, AGAIN, SWAP, AUTO = "defer", "recompute", "swap", "auto"
#: Abstract and §4.3: throughput relative to vLLM ("up to"), and the reduction of the mean latency of 200 requests in
#: per cent. In the paper's text the other numbers are missing.
PAPER_THROUGHPUT = {"alpaca": 1.8, "sharegpt": 2.1}
PAPER_LATENCY = 46.0


def at_latency(points: Mapping[str, float], limit: float) -> float | None:
    """The rate at which the normalised latency reaches `limit`, interpolating its logarithm linearly between points;
    None if it never does or exceeds it at the lowest rate."""
    known = sorted((float(rate), value) for rate, value in points.items())
    for (r0, v0), (r1, v1) in pairwise(known):
        if v0 <= limit < v1:
            return r0 + (r1 - r0) * log(limit / v0) / log(v1 / v0)
    return None


def reduction(own: float, base: float) -> float:
    return 100 * (1 - own / base)


def throughputs(curves: Mapping[str, Mapping[str, Mapping[str, float]]], limit: float) -> dict[str, float | None]:
    """Requests per second at which the normalised latency reaches `limit`."""
    by_rate = {n: {rate: point["normalised"] for rate, point in curve.items()} for n, curve in curves.items()}
    return {name: at_latency(points, limit) for name, points in by_rate.items()}


def ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own and base else None


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
    unknown, rows = [None] * len(COMPARED), []
    for data, paper in PAPER_THROUGHPUT.items():
        found = throughputs(simulated["curves"]["Fig. 6"][data], simulated["limit"]) if simulated else {}
        cells = [shown(ratio(found.get(name), found.get(VLLM)), TIMES) for name in COMPARED]
        title = f"throughput at equal latency (Fig. 6), {TITLES[data]}"
        rows.append([title, TIMES.format(paper), *cells, None, None])
    samples = {name: np.mean(own["sample"]) for name, own in (at(simulated, "latency", "systems") or {}).items()}
    cells = [PERCENT.format(reduction(samples[n], samples[VLLM])) if n in samples else None for n in COMPARED]
    for title, what, data, paper, here in (
        ("mean response latency reduction (Fig. 9)", "jct", "sharegpt", PERCENT.format(PAPER_LATENCY), cells),
        ("mean response latency reduction (Fig. 9)", "jct", "alpaca", None, unknown),
        ("normalised latency reduction", "normalised", "alpaca", None, unknown),
        ("normalised latency reduction", "normalised", "sharegpt", None, unknown),
    ):
        gains = [turns_gain(engine, data, name, what) for name in (SWAP, KNOWN)]
        rows.append([f"{title}, {TITLES[data]}", paper, *here, *gains])
    ours = *(f"simulated: {name}" for name in COMPARED), "engine: swap", "engine: Oracle"
    return markdown(rows, f"relative to {VLLM}", "paper", *ours)


def simulated_sections(simulated: Mapping[str, Any]) -> dict[str, str]:
    out, rows, curves = {}, [], simulated["curves"]
    for data, title in TITLES.items():
        for limit in (0.1, simulated["limit"], 0.4):
            found = throughputs(curves["Fig. 6"][data], limit)
            gains = [ratio(found[ALISE], found[base]) for base in (VLLM, ORCA)]
            rows.append([f"{title}, {1e3 * limit:.0f} ms/token", *found.values(), *gains])
    out["throughput"] = markdown(
        rows, "requests/s at a normalised latency (Fig. 6)", *each(curves["Fig. 6"]["alpaca"], "{:.2f}"),
        *each((f"{ALISE} / {base}" for base in (VLLM, ORCA)), TIMES),
    )  # fmt: skip

    rows = []
    for data, title in TITLES.items():
        found = curves["Fig. 8"][data]
        for rate in sorted({rate for curve in found.values() for rate in curve}, key=float):
            cells = [at(found, name, rate, "normalised") for name in MEMORIES]
            more = (AGAIN, "recomputed"), (SWAP, "swaps"), (SWAP, "stalled")
            rows.append([f"{title}, {rate}/s", *cells, *(at(found, name, rate, what) for name, what in more)])
    out["memory"] = markdown(
        rows, "normalised latency, ms/token (Fig. 8)", *each(MEMORIES, milliseconds),
        ("tokens recomputed (recompute)", share), ("swaps per request (swap)", "{:.2f}"),
        ("time waiting for transfers (swap)", share),
    )  # fmt: skip

    rows, systems = [], simulated["latency"]["systems"]
    base = np.array(systems[VLLM]["sample"])
    for name, found in systems.items():
        own = np.array(found["sample"])
        whole = reduction(found["mean"], systems[VLLM]["mean"])
        gains = reduction(own.mean(), base.mean()), 100 * (own < base).mean(), whole
        rows.append([name, own.mean(), np.median(own), np.percentile(own, 99), *gains])
    gains = "reduction of the mean", "requests faster than with FCFS", "reduction, whole trace"
    out["latency"] = markdown(
        rows, f"ShareGPT at {simulated['latency']['rate']:.2f}/s (Fig. 9)",
        *each(("mean of 200, s", "median", "p99"), "{:.1f}"), *each(gains, PERCENT),
    )  # fmt: skip
    return out


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def turns_gain(engine: Mapping[str, Any] | None, data: str, name: str, what: str) -> str:
    """Reduction relative to FCFS in per cent over the turns."""
    if engine is None or name == VLLM:
        return UNKNOWN
    pairs = zip(*(engine["systems"][data][system][what] for system in (name, VLLM)), strict=True)
    return shown([reduction(value, base) for value, base in pairs], spread())


def engine_section(engine: Mapping[str, Any]) -> str:
    return markdown(
        (
            [TITLES[data], name, found["normalised"], found["jct"],
             *(turns_gain(engine, data, name, what) for what in ("normalised", "jct")),
             found["preemptions"], np.median(found["working_set"]) / engine["kv"]]
            for data, name, found in walk(engine["systems"], 2)
        ),
        "engine", "system", ("normalised latency, ms/token", median(milliseconds)),
        ("mean latency, s", median("{:.2f}")), "reduction: normalised latency", "reduction: mean latency",
        "preemptions, all turns", ("working set / pool size", "{:.1f}"),
    )  # fmt: skip


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 6, 8 and 9 as PNG files next to the page."""
    for figure, name in (("Fig. 6", "rate"), ("Fig. 8", "memory")):
        panels = {title: simulated["curves"][figure][data] for data, title in TITLES.items()}
        plot.curves(
            out / f"alise_{name}.png", panels, "requests/s", "normalised latency, ms/token",
            lambda point: 1e3 * point["normalised"], top=600,
        )  # fmt: skip
    systems = simulated["latency"]["systems"]
    samples = {name: dict(enumerate(systems[name]["sample"])) for name in (VLLM, ALISE)}
    plot.curves(out / "alise_latency.png", {"ShareGPT": samples}, "request, by arrival", "response latency, s")
