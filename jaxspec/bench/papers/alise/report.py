"""Tables, headlines and figures of ALISE's page, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.bench import plot
from jaxspec.bench.estimates import interval
from jaxspec.bench.papers.headlines import Headline, table
from jaxspec.bench.table import PERCENT, TIMES, Form, at, each, markdown, share, shown, walk

TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
DATA = tuple(TITLES)
ORCA, VLLM = "FCFS, as ORCA", "FCFS, as vLLM"
ALISE, FULL = "ALISE, INT8 KV", "ALISE, FP16 KV"
PROXY, WORSE = "ALISE, INT8 KV, proxy's error", "ALISE, INT8 KV, σ = 0.5"
KNOWN, AGED, UNREAD = "ALISE, INT8 KV, lengths known", "ALISE, INT8 KV, no aging", "FCFS, as vLLM, INT8 KV"
MEMORIES = DEFER, AGAIN, SWAP, AUTO = "defer", "recompute", "swap", "auto"
#: On the engine, where KV is not quantised.
SWAP_KNOWN = "swap, lengths known"
#: (model, number of V100) by name in the tables: those of Fig. 6, and those of Table 3.
MODELS: Mapping[str, tuple[str, int]] = {
    "opt-13b, 1 V100": ("opt-13b", 1), "opt-13b, 2 V100": ("opt-13b", 2), "opt-6.7b": ("opt-6.7b", 1),
    "opt-2.7b": ("opt-2.7b", 1),
}  # fmt: skip
OTHERS = {name: (name, 1) for name in ("llama-13b", "llama-7b", "pythia-12b")}
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
STAGES = {"prefill": "prefill", "decode": "decoding, per token"}
RATE, GAIN, BELOW = interval("{:.2f}"), interval(TIMES), interval(PERCENT)
#: Of what is never negative: counts and errors.
COUNT, ERROR = interval("{:.2f}", least=0.0), interval(PERCENT, least=0.0)


def milliseconds(digits: int = 0) -> Form:
    """A form for an estimate in seconds."""
    return lambda found: shown([1e3 * x for x in found], interval(f"{{:.{digits}f}}"))


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    """Abstract: throughput relative to vLLM; §4.3: the mean latency; Table 3: tokens per second of a request."""
    found, seeds = [], at(kept, "simulated", "seeds")
    for data, paper in PAPER_THROUGHPUT.items():
        gain = at(kept, "simulated", "main", data, ALISE, "gain")
        what = f"throughput at 200 ms/token relative to vLLM (Fig. 6), {TITLES[data]}, OPT-13B"
        found.append(Headline(what, paper, gain, because=BECAUSE.get(data, ""), seeds=seeds))
    engine = at(kept, "engine", "systems", "sharegpt", SWAP, "jct below")
    latency = at(kept, "simulated", "latency", "systems", ALISE, "sample below")
    what = "mean latency of 200 requests below FCFS (Fig. 9), ShareGPT, OPT-13B"
    found.append(Headline(what, PAPER_LATENCY, latency, engine, PERCENT, BECAUSE["latency"], seeds=seeds))
    for data, model, (_, vllm, alise) in walk(PAPER_TABLE_3, 2):
        gain = at(kept, "simulated", "table 3", data, model, ALISE, "gain")
        what = f"tokens/s of a request relative to vLLM (Table 3), {TITLES[data]}, {model}"
        only = "" if model == BELOW_CAPACITY else OVERLOADED
        found.append(Headline(what, alise / vllm, gain, because=BECAUSE["table 3"], only=only, seeds=seeds))
    return found


#: The model of Table 3 whose capacity here is above the table's rates.
BELOW_CAPACITY = "llama-7b"
OVERLOADED = "the rate is far above what FCFS can serve here, and the ratio is that of a queue growing until the end"
#: Why a headline is missed; the page's tables show what changes it.
BECAUSE = {
    "latency": "200 requests differ from seed to seed; over the whole trace it is 47.4 %",
    "table 3": "the rate is below the capacity here, where all orders are alike",
}


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, for the experiments that have been run."""
    simulated, engine = kept.get("simulated"), kept.get("engine")
    out = {"headlines": table(headlines(kept))}
    if simulated:
        out |= _throughput(simulated) | _latency(simulated) | _runtime(simulated["runtime"])
    if engine:
        out["engine"] = engine_section(engine)
    return out


def _throughput(simulated: Mapping[str, Any]) -> dict[str, str]:
    minutes = simulated["minutes"]
    by_model = [
        (f"opt-13b, 1 V100, {minutes[data]:g} minutes", data, found) for data, found in simulated["main"].items()
    ]
    models = [
        [f"{TITLES[data]}, {name}", found[VLLM]["rate"], found[ALISE]["rate"], found[ALISE]["gain"]]
        for name, data, found in [*by_model, *walk(simulated["models"], 2)]
    ]
    first = next(iter(simulated["variations"].values()))
    out = {
        "models": markdown(
            models, "throughput at 200 ms/token", *each((f"{name}, requests/s" for name in (VLLM, ALISE)), RATE),
            ("relative to vLLM", GAIN),
        ),
        "variations": markdown(
            (
                [name, *(simulated["variations"][data][name][key] for data in DATA for key in ("rate", "gain"))]
                for name in first
            ),
            "OPT-13B, shorter traces",
            *((f"{title}: {what}", form) for title in TITLES.values()
              for what, form in (("requests/s", RATE), ("relative to vLLM", GAIN))),
        ),
        "rates": _rates(simulated["curves"], (
            ("normalised latency, ms/token", "normalised", milliseconds()),
            ("mean TTFT, s", "ttft", interval("{:.1f}")), ("requests/s served", "throughput", RATE),
        )),
        "memory": _rates(simulated["memory"], (
            ("normalised latency, ms/token (Fig. 8)", "normalised", milliseconds()),
            ("tokens recomputed", "recomputed", lambda e: share(e[0])), ("swaps per request", "swaps", COUNT),
            ("time waiting for transfers", "stalled", lambda e: share(e[0])),
        )),
    }  # fmt: skip
    if table_3 := simulated["table 3"]:
        rows = []
        for data, model, found in walk(table_3, 2):
            orca, vllm, alise = PAPER_TABLE_3[data][model]
            gains = orca / vllm, found[ORCA]["gain"], alise / vllm, found[ALISE]["gain"]
            rows.append([f"{TITLES[data]}, {model}", *gains, *(found[name]["speed"] for name in (VLLM, ALISE))])
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


def _runtime(found: Mapping[str, Any]) -> dict[str, str]:
    """Fig. 5 and Eq. 3 to 5."""
    alone = [
        [f"{STAGES[stage]}, {outputs} output tokens", 1e6 * line["slope"], 1e3 * line["offset"], line["error"]]
        for outputs, stage, line in walk(found["alone"], 2)
    ]
    served = [
        [f"{TITLES[data]}, {rate}/s", one["seconds"], one["error"], one["preempted"]]
        for data, rate, one in walk(found["served"], 2)
    ]
    return {
        "runtime": markdown(
            alone, "one request at a time (Fig. 5)", ("line's slope, µs per prompt token", "{:.2f}"),
            ("offset, ms", "{:.1f}"), ("largest error of the line", PERCENT),
        ),
        "estimates": markdown(
            served, "served by ALISE, INT8 KV", ("execution time, s", interval("{:.2f}")),
            ("mean error of Eq. 3 to 5", ERROR), ("preempted, left out", ERROR),
        ),
    }  # fmt: skip


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
    """Draw figures 5, 6, 8 and 9 as PNG files next to the page."""
    for figure, name in (("curves", "rate"), ("memory", "memory")):
        panels = {title: simulated[figure][data] for data, title in TITLES.items()}
        plot.curves(
            out / f"alise_{name}.png", panels, "requests/s", "normalised latency, ms/token",
            lambda point: [1e3 * x for x in point["normalised"]], top=600,
        )  # fmt: skip
    alone, prompts = simulated["runtime"]["alone"], simulated["runtime"]["prompts"]
    plot.curves(
        out / "alise_runtime.png",
        {title: {f"{outputs} output tokens": dict(zip(prompts, by_stage[stage]["seconds"], strict=True))
                 for outputs, by_stage in alone.items()}
         for stage, title in STAGES.items()},
        "prompt tokens", "ms", lambda seconds: 1e3 * seconds,
    )  # fmt: skip
    samples = {name: dict(enumerate(seconds)) for name, seconds in simulated["latency"]["sample"].items()}
    plot.curves(out / "alise_latency.png", {"ShareGPT": samples}, "request, by arrival", "latency, s")
