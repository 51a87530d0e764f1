"""Tables, headlines and figures of ALISE's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.papers.estimates import interval
from jaxspec.bench.papers.headlines import Headline, table
from jaxspec.bench.table import PERCENT, TIMES, Form, at, each, markdown, share, shown, walk

TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
DATA = tuple(TITLES)
ORCA, VLLM = "FCFS, as ORCA", "FCFS, as vLLM"
ALISE, FULL = "ALISE, INT8 KV", "ALISE, FP16 KV"
PROXY, WORSE = "ALISE, INT8 KV, proxy's error", "ALISE, INT8 KV, σ = 0.5"
KNOWN, AGED, UNREAD = "ALISE, INT8 KV, lengths known", "ALISE, INT8 KV, no aging", "FCFS, as vLLM, INT8 KV"
MEMORIES = DEFER, AGAIN, SWAP, AUTO = "defer", "recompute", "swap", "auto"
#: Models by name in the tables: (name, number of V100).
MODELS: Mapping[str, tuple[str, int]] = {
    "opt-13b, 1 V100": ("opt-13b", 1), "opt-13b, 2 V100": ("opt-13b", 2), "opt-6.7b": ("opt-6.7b", 1),
    "opt-2.7b": ("opt-2.7b", 1), "llama-13b": ("llama-13b", 1), "llama-7b": ("llama-7b", 1),
    "pythia-12b": ("pythia-12b", 1),
}  # fmt: skip
#: Abstract and §4.3: throughput relative to vLLM ("up to"), and the reduction of the mean latency of 200 requests in
#: per cent. In the paper's text the other numbers are missing.
PAPER_THROUGHPUT = {"alpaca": 1.8, "sharegpt": 2.1}
PAPER_LATENCY = 46.0
#: Table 3: ORCA, vLLM, ALISE; the unit is missing in the paper's text.
PAPER_TABLE_3 = {
    "alpaca": {"llama-13b": (42.23, 71.87, 101.42), "llama-7b": (75.42, 122.87, 164.51),
               "pythia-12b": (34.85, 64.19, 91.12)},
    "sharegpt": {"llama-13b": (14.42, 27.89, 41.22), "llama-7b": (30.28, 62.93, 87.32),
                 "pythia-12b": (12.36, 24.95, 37.27)},
}  # fmt: skip
RATE, GAIN, BELOW = interval("{:.2f}"), interval(TIMES), interval(PERCENT)


def milliseconds(digits: int = 0) -> Form:
    """A form for an estimate in seconds."""
    return lambda found: shown([1e3 * x for x in found], interval(f"{{:.{digits}f}}"))


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    """Abstract: throughput relative to vLLM, "up to", so that of the model with most; §4.3: the mean latency."""
    models = at(kept, "simulated", "models") or {}
    found = []
    for data, paper in PAPER_THROUGHPUT.items():
        gains = {name: own[data][ALISE]["gain"] for name, own in models.items() if name.startswith("opt")}
        best = max(gains, key=lambda name: gains[name][0], default=None)
        what = f"throughput at 200 ms/token relative to vLLM (Fig. 6), {TITLES[data]}" + (f", {best}" if best else "")
        found.append(Headline(what, paper, gains.get(best) if best else None, because=BECAUSE.get(data, "")))
    engine = at(kept, "engine", "systems", "sharegpt", SWAP, "jct below")
    latency = at(kept, "simulated", "latency", "systems", ALISE, "sample below")
    what = "mean latency of 200 requests below FCFS (Fig. 9), ShareGPT, OPT-13B"
    return [*found, Headline(what, PAPER_LATENCY, latency, engine, PERCENT, BECAUSE.get("latency", ""))]


#: Why a headline is missed; the page's tables show what changes it.
BECAUSE: Mapping[str, str] = {}


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    out = {"headlines": table(headlines(kept))}
    if simulated:
        out |= _throughput(simulated) | _latency(simulated)
    if engine:
        out["engine"] = engine_section(engine)
    return out


def _throughput(simulated: Mapping[str, Any]) -> dict[str, str]:
    models = [
        [f"{name}, {TITLES[data]}", *(at(found, VLLM, "rate"), at(found, FULL, "gain"), at(found, ALISE, "gain"))]
        for name, by_data in simulated["models"].items() for data, found in by_data.items()
    ]  # fmt: skip
    first = next(iter(simulated["variations"].values()))
    out = {
        "models": markdown(
            models, "throughput at 200 ms/token", (f"{VLLM}, requests/s", RATE), *each((FULL, ALISE), GAIN)
        ),
        "variations": markdown(
            (
                [name, *(simulated["variations"][data][name][key] for data in DATA for key in ("rate", "gain"))]
                for name in first
            ),
            f"OPT-13B, {simulated['fewer']:g} minutes",
            *((f"{title}: {what}", form) for title in TITLES.values()
              for what, form in (("requests/s", RATE), ("relative to vLLM", GAIN))),
        ),
        "rates": _rates(simulated["curves"], (
            ("normalised latency, ms/token", "normalised", milliseconds()),
            ("mean TTFT, s", "ttft", interval("{:.1f}")), ("requests/s served", "throughput", RATE),
        )),
        "memory": _rates(simulated["memory"], (
            ("normalised latency, ms/token (Fig. 8)", "normalised", milliseconds()),
            ("tokens recomputed", "recomputed", lambda e: share(e[0])), ("swaps per request", "swaps", RATE),
            ("time waiting for transfers", "stalled", lambda e: share(e[0])),
        )),
    }  # fmt: skip
    if table_3 := simulated["table 3"]:
        rows = []
        for data, model, found in walk(table_3, 2):
            orca, vllm, alise = PAPER_TABLE_3[data][model]
            ours = [found[system][key] for system in (VLLM, ALISE) for key in ("speed",)]
            rows.append(
                [
                    f"{TITLES[data]}, {model}",
                    orca / vllm,
                    found[ORCA]["gain"],
                    alise / vllm,
                    found[ALISE]["gain"],
                    *ours,
                ]
            )
        out["table 3"] = markdown(
            rows, "tokens per second of a request, relative to vLLM (Table 3)", ("ORCA: paper", TIMES),
            ("simulated", GAIN), ("ALISE: paper", TIMES), ("simulated", GAIN),
            *each((f"{name}, tokens/s" for name in ("vLLM", "ALISE")), interval("{:.1f}")),
        )  # fmt: skip
    return out


def _rates(curves: Mapping[str, Any], columns: tuple[tuple[str, str, Form], ...]) -> str:
    """One row per data set, rate and system."""
    rows = [
        [f"{TITLES[data]}, {rate}/s, {system}", *(found[key] for _, key, _ in columns)]
        for data, by_system in curves.items()
        for rate in dict.fromkeys(rate for by_rate in by_system.values() for rate in by_rate)
        for system, by_rate in by_system.items() if rate in by_rate for found in [by_rate[rate]]
    ]  # fmt: skip
    return markdown(rows, "OPT-13B", *((label, form) for label, _, form in columns))


def _latency(simulated: Mapping[str, Any]) -> dict[str, str]:
    found = simulated["latency"]
    keys = ("sample", "jct", "p99", "ttft")
    labels = "200 requests, mean", "whole trace, mean", "p99", "TTFT, mean"
    rows = [
        [name, *(one[key] for key in keys), *(one[f"{key} below"] if name != VLLM else None for key in keys)]
        for name, one in found["systems"].items()
    ]
    below = each((f"{label}: below FCFS" for label in labels), BELOW)
    what = f"ShareGPT at {found['rate']:.2f}/s (Fig. 9), latency in s"
    return {"latency": markdown(rows, what, *each(labels, interval("{:.1f}")), *below)}


def engine_section(engine: Mapping[str, Any]) -> str:
    return markdown(
        (
            [TITLES[data], name, found["normalised"], found["jct"],
             *(found[f"{key} below"] if name != VLLM else None for key in ("normalised", "jct", "ttft")),
             found["preemptions"], found["working_set"] / engine["kv"]]
            for data, name, found in walk(engine["systems"], 2)
        ),
        "engine", "system", ("normalised latency, ms/token", milliseconds(1)), ("mean latency, s", RATE),
        *each((f"below FCFS: {what}" for what in ("normalised latency", "mean latency", "TTFT")), BELOW),
        "preemptions, all turns", ("working set / pool size", "{:.1f}"),
    )  # fmt: skip


def draw(out: Path, simulated: Mapping[str, Any]) -> None:
    """Draw figures 6, 8 and 9 as PNG files next to the page."""
    for figure, name in (("curves", "rate"), ("memory", "memory")):
        panels = {title: simulated[figure][data] for data, title in TITLES.items()}
        plot.curves(
            out / f"alise_{name}.png", panels, "requests/s", "normalised latency, ms/token",
            lambda point: [1e3 * x for x in point["normalised"]], top=600,
        )  # fmt: skip
    samples = {name: dict(enumerate(seconds)) for name, seconds in simulated["latency"]["sample"].items()}
    plot.curves(out / "alise_latency.png", {"ShareGPT": samples}, "request, by arrival", "latency, s")
