"""Compares orders of requests: arrivals × load × length predictor × order, on the same simulated requests.

Lengths are those of SSJF's published answers with their predicted classes; with --predictions, those of a model's own
answers, with what real predictors said of them. Arrivals are a Poisson process, bursts (Gamma gaps with a coefficient
of variation of 4) or a part of Azure's trace, scaled to the load: the share of the tokens per second that a full batch
gives. The device is LAPS-SD's (LLaMA-7B on an L20). Each cell is relative to FCFS with the same requests, over the
seeds.

With --engine, the main cells on the engine: prompts of the test part of a file of answers, which are answered again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.estimates import estimate, interval, ratio
from jaxspec.bench.papers import orders_engine, page
from jaxspec.bench.papers import recorded as recordings
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.presets import overrides
from jaxspec.bench.papers.recorded import Recorded
from jaxspec.bench.papers.runs import Result, Runs
from jaxspec.bench.papers.serving import simulate
from jaxspec.bench.table import TIMES, Column, markdown, share
from jaxspec.errors import explained
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.cost import LLAMA_7B_L20, StepLoad
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload, noisy, read_lengths

FILES = {
    "lengths": File("lengths/ssjf_vicuna13b_predictions.csv", "CSV", "columns output_tokens, pred_class5"),
    "trace": File("traces/azure_llm_2023_conv.csv", "CSV", "column arrival_s: Azure's conversations"),
}  # fmt: skip
ARRIVALS = ("poisson", "bursty", "azure")
#: What predicts: nothing, SSJF's proxy (its published classes), the true length with a log-normal error of 0.5, the
#: true length.
PREDICTORS = ("none", "proxy", "noisy", "oracle")
#: With recorded predictions: nothing, the proxy, similar prompts' lengths, both together, the proxy and while an answer
#: is generated the length probe, the true length.
RECORDED = ("none", "proxy", "retrieval", "blend", "probe", "oracle")
ORDERS = ("fcfs", "las", "laps_sd", "sjf", "alise", "srpt", "gittins", "boost")
#: Orders for which predictions make no difference.
BLIND = ("fcfs", "las")
FCFS = "fcfs"
LOADS = (0.7, 0.9, 1.1)
SEATS, PROMPT, CV, ERROR = 16, 128, 4.0, 0.5
#: Requests are short up to this quantile of the output lengths, and long from that one on.
SHORT, LONG = 0.25, 0.75
#: Where no order gains more than this over FCFS, shares of the gain are chance.
WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation: a point of the grid, an order and a seed."""

    arrivals: str
    load: float
    predictor: str
    order: str
    seed: int
    count: int


@dataclass(frozen=True, slots=True)
class Data:
    lengths: Lengths
    trace: Sequence[Arrival]
    recorded: Recorded | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder with the files of lengths and traces")
    page.add_files(parser, FILES)
    for name, choices in (
        ("arrivals", ARRIVALS), ("predictors", tuple(dict.fromkeys(PREDICTORS + RECORDED))), ("orders", ORDERS)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", nargs="+", choices=choices, help="default: all of them")
    parser.add_argument(
        "--predictions", metavar="JSONL", help="answers and predictions of jaxspec.train_predictor.predictions"
    )
    parser.add_argument("--loads", nargs="+", type=options.positive, default=list(LOADS), metavar="SHARE")
    parser.add_argument("--num-requests", type=options.count, default=600, metavar="N", help="default: 600")
    parser.add_argument("--seeds", type=options.count, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--processes", type=options.count, default=os.cpu_count() or 1, metavar="N",
        help="simulations at the same time (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", default="build/papers", metavar="DIR", help="folder of single results, to go on after a stop"
    )
    parser.add_argument("--out", default="build/orders", metavar="DIR", help="output folder (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")
    engine = parser.add_argument_group("on the engine")
    engine.add_argument("--engine", metavar="JSONL", help="answers of jaxspec.train_predictor.collect")
    engine.add_argument("--model", help="the model that answers (default: smollm2-135m)")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine setting; repeatable")
    options.add_numbers(
        engine,
        ("--engine-jobs N", 32, "requests per turn"),
        ("--engine-turns N", 5, "turns of each order"),
        ("--engine-load SHARE", 1.0, "requests/s as a share of what the engine serves"),
        ("--engine-tokens N", 1024, "output cap in tokens"),
    )


def run(args: argparse.Namespace) -> int:
    """Simulate all cells, write the page, and print its summary. Raises `BenchError` if the data cannot be read."""
    if args.engine is not None:
        return _on_engine(args)
    page.find_files(args, FILES)
    known = PREDICTORS if args.predictions is None else RECORDED
    predictors = args.predictors or known
    try:
        recorded = None
        if args.predictions is None:
            lengths = read_lengths(args.lengths, "pred_class5")
        else:
            recorded = recordings.read(args.predictions)
            lengths = recorded.lengths
            if not any(recorded.left):
                predictors = [name for name in predictors if name != "probe"]
        data = Data(lengths, arrivals.trace(args.trace), recorded)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if unknown := set(predictors) - set(known):
        raise BenchError(
            f"--predictors: {', '.join(sorted(unknown))}: not in these data, choose from {', '.join(known)}"
        )
    cells = [
        Cell(kind, load, predictor, order, seed, args.num_requests)
        for kind in args.arrivals or ARRIVALS for load in args.loads for predictor in predictors
        for order in dict.fromkeys([FCFS, *(args.orders or ORDERS)]) for seed in range(args.seeds)
        if predictor == "none" or order not in BLIND
    ]  # fmt: skip
    cells += [replace(c, predictor="none", order=FCFS) for c in cells]  # the baseline of each
    found = Runs(Path(args.keep) / "orders.jsonl", args.processes).results("simulations", serve, data, cells)
    numbers = {"requests": args.num_requests, "seeds": args.seeds, "cells": summary(found)}
    kind, figure = ("simulated", "orders") if recorded is None else ("recorded", "orders_recorded")
    kept = page.publish(args, "orders", "Orders of requests", kind, numbers, sections)
    draw(Path(args.out) / f"{figure}.png", kept[kind]["cells"], known)
    print(_summary(kept[kind]["cells"]))
    print(f"\nTables: {Path(args.out) / 'orders.md'}")
    return 0


#: Options of the simulation, which mean nothing with --engine.
_SIMULATED = ("data", "arrivals", "predictors", "orders", "predictions")


def _on_engine(args: argparse.Namespace) -> int:
    if given := [name for name in _SIMULATED if getattr(args, name) is not None]:
        raise BenchError(f"--engine compares fixed orders on the engine: --{', --'.join(given)} cannot be combined")
    work = orders_engine.Work(
        args.engine, args.engine_jobs, args.engine_load, args.engine_tokens, args.engine_turns, seed=0
    )
    numbers = orders_engine.measure(work, args.model, overrides(args))
    page.publish(args, "orders", "Orders of requests", "engine", numbers, sections)
    print(orders_engine.table(numbers["cells"]))
    return 0


def serve(data: Data, cell: Cell) -> Result:
    """Seconds of the requests' JCT and TTFT: mean, p99; mean slowdown of short and long ones; preemptions per
    request."""
    settings: dict[str, Any] = {"order": cell.order}
    if cell.predictor == "oracle":
        settings["predictor"] = "oracle"
    work, rows = workload(data, cell)
    probe = None
    if cell.predictor == "probe" and data.recorded is not None:
        probe = (data.recorded.every, data.recorded.probe(rows))
    served = simulate(PolicyConfig(**settings), SEATS, work, LLAMA_7B_L20, probe=probe)
    output, slowdown = served.workload.output, served.jct / alone(served)
    short, long = (output <= np.quantile(output, SHORT)), (output >= np.quantile(output, LONG))
    ttft = served.first_token - served.workload.arrival
    return {
        "mean": float(served.jct.mean()), "p99": float(np.quantile(served.jct, 0.99)), "ttft": float(ttft.mean()),
        "short": float(slowdown[short].mean()), "long": float(slowdown[long].mean()),
        "preemptions": (float(served.preemptions.sum()) + served.pauses) / len(output),
    }  # fmt: skip


def workload(data: Data, cell: Cell) -> tuple[Workload, np.ndarray]:
    """The cell's requests, the same for all orders and predictors, and their rows in the table of lengths."""
    rng = np.random.default_rng([cell.seed, round(1000 * cell.load), ARRIVALS.index(cell.arrivals)])
    full = SEATS / LLAMA_7B_L20.seconds(StepLoad(SEATS, context=SEATS * (PROMPT + 100)))
    rate = cell.load * full / float(data.lengths.output.mean())
    if cell.arrivals == "azure":
        times = arrivals.part(data.trace, cell.count, rate, rng)
    else:
        times = arrivals.gamma(cell.count, rate, CV if cell.arrivals == "bursty" else 1.0, rng)
    table, rows = data.lengths, rng.integers(len(data.lengths), size=cell.count)
    inputs = np.where(table.input > 0, table.input, PROMPT)
    work = Workload(np.array([a.time for a in times]), inputs[rows], table.output[rows], table.predicted[rows])
    match cell.predictor:
        case "none" | "oracle":
            work = work.predict(np.full(len(work), np.nan))
        case "noisy":
            work = work.predict(noisy(work.output, ERROR, rng))
        case name if data.recorded is not None:
            work = work.predict(data.recorded.predicted["proxy" if name == "probe" else name][rows])
    return work, rows


def alone(served: Served) -> np.ndarray:
    """Seconds that each request would take alone `[requests]`."""
    return np.array([
        LLAMA_7B_L20.seconds(StepLoad(n, starting=1)) + (m - 1) * LLAMA_7B_L20.seconds(StepLoad(1, context=n))
        for n, m in zip(served.workload.input.tolist(), served.workload.output.tolist(), strict=True)
    ])  # fmt: skip


def summary(found: Mapping[Cell, Result]) -> list[dict[str, Any]]:
    """A row per arrivals, load, predictor and order: estimates over the seeds; JCT and TTFT relative to FCFS."""
    groups: dict[tuple[str, float, str, str], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.arrivals, cell.load, cell.predictor, cell.order), []).append(cell)
    rows = []
    for (kind, load, predictor, order), cells in groups.items():
        own = [found[c] for c in cells]
        base = [found[replace(c, predictor="none", order=FCFS)] for c in cells]
        relative = {m: ratio([r[m] for r in own], [r[m] for r in base]) for m in ("mean", "p99", "ttft")}
        absolute = {m: estimate([r[m] for r in own]) for m in ("short", "long", "preemptions")}
        rows.append({"arrivals": kind, "load": load, "predictor": predictor, "order": order, **relative, **absolute})
    return rows


def _gain(row: Mapping[str, Any]) -> float:
    """By what share the mean JCT is below FCFS's."""
    return 1 - row["mean"][0]


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    out = {}
    if engine := kept.get("engine"):
        out["engine"] = orders_engine.table(engine["cells"])
    if recorded := kept.get("recorded"):
        out["recorded"] = _summary(recorded["cells"])
        out["recorded losses"] = _losses(recorded["cells"])
    if "simulated" not in kept:
        return out
    rows = kept["simulated"]["cells"]
    out["summary"] = _summary(rows)
    columns: list[Column] = [
        ("order", "{}", "order"), ("predictor", "{}", "predictor"),
        *((title, interval(TIMES), key) for title, key in (("mean JCT", "mean"), ("p99", "p99"), ("TTFT", "ttft"))),
        *((title, interval("{:.1f}"), key) for title, key in (("slowdown, short", "short"), ("long", "long"))),
        ("preemptions per request", interval("{:.2f}"), "preemptions"),
    ]  # fmt: skip
    for kind, load in dict.fromkeys((row["arrivals"], row["load"]) for row in rows):
        cells = [row for row in rows if (row["arrivals"], row["load"]) == (kind, load) and row["order"] != FCFS]
        out[f"{kind}, {load:g}"] = f"**{kind}, load {load:g}**\n\n{markdown(cells, *columns)}"
    out["losses"] = _losses(rows)
    return out


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    columns: list[Column] = [
        ("order", "{}", "order"), ("predictor", "{}", "predictor"), ("mean JCT", TIMES, "mean"),
        ("worst", TIMES, "worst mean"), ("p99 JCT", TIMES, "p99"), ("worst", TIMES, "worst p99"),
        ("share of the largest gain", share, "gain"), ("TTFT", TIMES, "ttft"),
        *((title, "{:.1f}", key) for title, key in (("slowdown, short", "short"), ("long", "long"))),
        ("preemptions per request", "{:.2f}", "preemptions"),
    ]  # fmt: skip
    return markdown(_lines(rows), *columns)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per order and predictor, over all arrivals and loads: mean and worst ratios, and the share of the largest gain of
    any order and predictor there, where that is `WORTH` it; by mean JCT."""
    best: dict[tuple[str, float], float] = {}
    for row in rows:
        place = row["arrivals"], row["load"]
        best[place] = max(best.get(place, 0.0), _gain(row))
    lines = []
    for order, predictor in dict.fromkeys((row["order"], row["predictor"]) for row in rows if row["order"] != FCFS):
        own = [row for row in rows if (row["order"], row["predictor"]) == (order, predictor)]
        gains = [_gain(r) / most for r in own if (most := best[r["arrivals"], r["load"]]) > WORTH]
        means, tails = ([r[key][0] for r in own] for key in ("mean", "p99"))
        lines.append({
            "order": order, "predictor": predictor, "mean": np.mean(means), "worst mean": max(means),
            "p99": np.mean(tails), "worst p99": max(tails), "gain": float(np.mean(gains)) if gains else None,
            **{key: np.mean([r[key][0] for r in own]) for key in ("ttft", "short", "long", "preemptions")},
        })  # fmt: skip
    return sorted(lines, key=lambda line: line["mean"])


def draw(path: Path, rows: Sequence[Mapping[str, Any]], predictors: Sequence[str]) -> None:
    """Plot mean against p99 of the JCT, relative to FCFS, of every order and predictor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for predictor, marker in zip(predictors, "xos^vD", strict=False):
        lines = [line for line in _lines(rows) if line["predictor"] == predictor and line["mean"] < 1.5]
        axes.scatter(
            [x["mean"] for x in lines], [x["p99"] for x in lines], marker=marker, label=f"predictor: {predictor}"
        )
        for line in lines:
            axes.annotate(line["order"], (line["mean"], line["p99"]), (3, 3), textcoords="offset points", fontsize=7)
    axes.axhline(1.1, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="mean JCT, relative to FCFS", ylabel="p99 of JCT, relative to FCFS")
    axes.legend()
    figure.savefig(path, dpi=100)


def _losses(rows: Sequence[Mapping[str, Any]]) -> str:
    """Cells in which another order's mean JCT is below Gittins' by more than both intervals."""
    own = {(r["arrivals"], r["load"], r["predictor"]): r["mean"] for r in rows if r["order"] == "gittins"}
    lost = []
    for row in rows:
        gittins = own.get((row["arrivals"], row["load"], row["predictor"]))
        if row["order"] not in (FCFS, "gittins") and gittins is not None and row["mean"][2] < gittins[1]:
            lost.append({**row, "gittins": gittins})
    columns: list[Column] = [
        *((name, "{}", name) for name in ("arrivals", "load", "predictor", "order")),
        ("its mean JCT", interval(TIMES), "mean"), ("gittins'", interval(TIMES), "gittins"),
    ]  # fmt: skip
    if not lost:
        return "In no cell is another order's mean JCT below Gittins' by more than the intervals."
    return (
        f"Cells in which another order's mean JCT is below Gittins' beyond the intervals:\n\n{markdown(lost, *columns)}"
    )
