"""ALISE (Zhao & Wang 2024): shortest remaining time first with KV swapped by estimated wait, against FCFS.

Models of the paper on one V100 or two serve Poisson arrivals (§4.1) with Alpaca's and ShareGPT's lengths. Batches are
as large as memory allows. Throughput is the rate at which the normalised latency, the mean over requests of latency
per output token, reaches 200 ms (§4.2), found by bisection.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.alise import cases, engine, report
from jaxspec.bench.papers.alise.cases import CONTEXT, Case, Data, Knee, System
from jaxspec.bench.papers.alise.report import (
    AGED,
    ALISE,
    DATA,
    FULL,
    KNOWN,
    MEMORIES,
    MODELS,
    ORCA,
    PROXY,
    UNREAD,
    VLLM,
    WORSE,
)  # fmt: skip
from jaxspec.bench.papers.estimates import Estimate, estimate, means, ratio, reduction
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.runs import Runs
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.workload import Lengths, read_lengths

TITLE, headlines = "ALISE", report.headlines
FILES = {
    "alpaca": File("prompts/alpaca.jsonl", "JSONL", 'lines of {"turns": [text], "reference": text}'),
    "sharegpt": File("lengths/sharegpt_first_round.csv", "CSV", "columns input_tokens, output_tokens"),
}
SEEDS, QUICK = 5, 2
#: Minutes of a trace: in the paper, of variations, and with --quick.
MINUTES, FEWER, FEWEST = 30.0, 10.0, 3.0
#: §4.2's constraint on the normalised latency, seconds per token.
LIMIT = 0.2
#: The first rate, in requests per second, that a search for a knee tries.
START = {"alpaca": 16.0, "sharegpt": 1.0}
#: Rates of a figure relative to the one at which FCFS, as vLLM, saturates.
LOADS, FEW_LOADS = (0.4, 0.7, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 2.5), (0.7, 1.0, 1.3)
#: σ of log-normal errors whose mean is Table 2's for OPT-13B, 0.123 of the length with retrieval and 0.178 with the
#: proxy; and one like SSJF's predictor.
ERROR, PROXY_ERROR, LARGE_ERROR = 0.154, 0.223, 0.5
#: Requests per second of Table 3.
TABLE_3 = {"alpaca": 30.0, "sharegpt": 2.0}

FIRST_COME = Preset("fcfs").but(memory="recompute")


def alise(memory: str = "swap", **changes: Any) -> Preset:
    return Preset("alise").but(memory=memory, predictor="oracle", **changes)


#: Fig. 6 and variations. In the paper ALISE's KV is INT8, and vLLM's FP16. Aging is the preset's.
SYSTEMS: Mapping[str, System] = {
    ORCA: System(FIRST_COME, kv=1.0, reserving=True),
    VLLM: System(FIRST_COME, kv=1.0),
    FULL: System(alise(), kv=1.0, error=ERROR),
    ALISE: System(alise(), error=ERROR),
    PROXY: System(alise(), error=PROXY_ERROR),
    WORSE: System(alise(), error=LARGE_ERROR),
    KNOWN: System(alise()),
    AGED: System(alise(aging_ms=None), error=ERROR),
    UNREAD: System(FIRST_COME),
}  # fmt: skip
#: Fig. 8: ALISE with other memory policies.
MEMORY_SYSTEMS = {memory: System(alise(memory), error=ERROR) for memory in MEMORIES}
#: Compared in every experiment.
MAIN = VLLM, FULL, ALISE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(parser.add_argument_group("load"), ("--minutes M", MINUTES, "length of the main traces"))
    engine.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(args, TITLE, FILES, read, simulated, on_engine, report.sections, report.draw)


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths]]:
    """Lengths by data set. Raises OSError or ValueError."""
    return ({name: fitting(read_lengths(getattr(args, name))) for name in DATA},)


def fitting(table: Lengths) -> Lengths:
    """Requests within the model's context. Raises ValueError if there are none."""
    rows = (table.input > 0) & (table.input + table.output <= CONTEXT)
    if not rows.any():
        raise ValueError(f"no request of at most {CONTEXT} tokens, prompt and answer together")
    return Lengths(table.input[rows], table.output[rows], table.predicted[rows])


def on_engine(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """See `engine.measure`."""
    return engine.measure(args, tables, {VLLM: SYSTEMS[VLLM], **MEMORY_SYSTEMS, KNOWN: SYSTEMS[KNOWN]}, ERROR)


def simulated(args: argparse.Namespace, runs: Runs, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Knees in requests per second, and metrics at rates relative to that of FCFS: estimates over the seeds."""
    return Experiment(args, runs, tables).measure()


class Experiment:
    """The simulations of one run of the command."""

    def __init__(self, args: argparse.Namespace, runs: Runs, tables: Mapping[str, Lengths]) -> None:
        variants = Variants.of(args)
        self._own = list(variants.systems)
        systems: dict[str, System] = {**SYSTEMS, **MEMORY_SYSTEMS}
        if variants.predictor:
            systems |= {
                name: replace(one, preset=one.preset.but(**variants.predictor), error=None)
                for name, one in systems.items() if one.error is not None
            }  # fmt: skip
        systems |= {name: System(preset, kv=1.0) for name, preset in variants.systems.items()}
        self._runs, self._data = runs, Data(systems, tables, variants)
        self._quick = args.quick
        self._minutes = min(args.minutes, FEWEST) if args.quick else args.minutes
        self._fewer = min(self._minutes, FEWER)
        self._seeds = range(args.seed, args.seed + (args.seeds or (QUICK if args.quick else SEEDS)))
        #: Knees by (system, data, model, devices, minutes): one per seed.
        self._knees: dict[tuple[str, str, str, int, float], list[float]] = {}

    def measure(self) -> dict[str, Any]:
        main = {"opt-13b, 1 V100": ("opt-13b", 1)}
        more = {} if self._quick else {name: MODELS[name] for name in MODELS if name not in main}
        self._search([(s, *main["opt-13b, 1 V100"], self._minutes) for s in (*MAIN, *self._own)])
        others = [ORCA, KNOWN] if self._quick else [ORCA, PROXY, WORSE, KNOWN, AGED, UNREAD]
        self._search(
            [(s, "opt-13b", 1, self._fewer) for s in (*MAIN, *others)]
            + [(s, *model, self._fewer) for s in MAIN for model in more.values()]
        )
        models = {
            name: self._gains(*model, self._minutes if name in main else self._fewer)
            for name, model in (main | more).items()
        }
        variations = {
            data: {name: self._gain(name, data, "opt-13b", 1, self._fewer) for name in (*MAIN, *others)}
            for data in DATA
        }
        return {
            "minutes": self._minutes, "fewer": self._fewer, "seeds": len(self._seeds), "limit": LIMIT,
            "models": models, "variations": variations, "curves": self._curves(), "memory": self._memory(),
            "latency": self._latency(), "table 3": {} if self._quick else self._table_3(),
        }  # fmt: skip

    def _search(self, wanted: list[tuple[str, str, int, float]]) -> None:
        """Find the knees of (system, model, devices, minutes) for both data sets."""
        tasks = {
            (system, data, model, devices, minutes, seed): Knee(
                Case(system, data, START[data], minutes, seed, model, devices), LIMIT
            )
            for system, model, devices, minutes in wanted for data in DATA for seed in self._seeds
        }  # fmt: skip
        found = self._runs.results("knees", cases.find_knee, self._data, tasks.values())
        for system, data, model, devices, minutes, _ in tasks:
            of_seeds = [tasks[system, data, model, devices, minutes, seed] for seed in self._seeds]
            self._knees[system, data, model, devices, minutes] = [found[task]["rate"] for task in of_seeds]

    def _gain(self, system: str, data: str, model: str, devices: int, minutes: float) -> dict[str, Estimate | None]:
        own, base = (self._knees[name, data, model, devices, minutes] for name in (system, VLLM))
        return {"rate": estimate(own), "gain": ratio(own, base)}

    def _gains(self, model: str, devices: int, minutes: float) -> dict[str, Any]:
        systems = (*MAIN, *self._own) if (model, devices) == ("opt-13b", 1) else MAIN
        return {data: {name: self._gain(name, data, model, devices, minutes) for name in systems} for data in DATA}

    def _at_loads(self, systems: tuple[str, ...], loads: tuple[float, ...]) -> dict[str, Any]:
        """`{data: {system: {rate: estimates}}}` at rates relative to the knee of FCFS, as vLLM."""
        rates = {
            data: [round(load * float(np.mean(self._knees[VLLM, data, "opt-13b", 1, self._fewer])), 2)
                   for load in loads]
            for data in DATA
        }  # fmt: skip
        tasks = {
            (data, system, rate, seed): Case(system, data, rate, self._fewer, seed)
            for data in DATA for system in systems for rate in rates[data] for seed in self._seeds
        }  # fmt: skip
        found = self._runs.results("rates", cases.serve, self._data, tasks.values())
        out: dict[str, Any] = {data: {system: {} for system in systems} for data in DATA}
        for data, system, rate in dict.fromkeys(key[:3] for key in tasks):
            results = [found[tasks[data, system, rate, seed]] for seed in self._seeds]
            out[data][system][f"{rate:g}"] = means(results)
        return out

    def _curves(self) -> dict[str, Any]:
        """Fig. 6."""
        return self._at_loads((*MAIN, *self._own), FEW_LOADS if self._quick else LOADS)

    def _memory(self) -> dict[str, Any]:
        """Fig. 8."""
        return self._at_loads(MEMORIES, FEW_LOADS if self._quick else (0.7, 1.0, 1.3, 1.6, 2.0))

    def _latency(self) -> dict[str, Any]:
        """Fig. 9: OPT-13B on ShareGPT at the rate at which FCFS reaches the limit."""
        rate = float(np.mean(self._knees[VLLM, "sharegpt", "opt-13b", 1, self._minutes]))
        tasks = {
            (name, seed): Case(name, "sharegpt", rate, self._minutes, seed) for name in MAIN for seed in self._seeds
        }
        found = self._runs.results("latencies (Fig. 9)", cases.serve, self._data, tasks.values())
        by_system = {name: [found[tasks[name, seed]] for seed in self._seeds] for name in MAIN}
        samples = self._runs.results(
            "sample (Fig. 9)", cases.latencies, self._data, [tasks[n, self._seeds[0]] for n in (VLLM, ALISE)]
        )
        return {
            "rate": rate,
            "systems": {
                name: means(results) | {
                    f"{metric} below": reduction(
                        [one[metric] for one in results], [one[metric] for one in by_system[VLLM]]
                    )
                    for metric in ("sample", "jct", "p99", "ttft")
                }
                for name, results in by_system.items()
            },
            "sample": {name: samples[tasks[name, self._seeds[0]]]["seconds"] for name in (VLLM, ALISE)},
        }  # fmt: skip

    def _table_3(self) -> dict[str, Any]:
        """Table 3: tokens per second of a request at its rates."""
        models = {name: model for name, model in MODELS.items() if not name.startswith("opt")}
        systems = (ORCA, VLLM, ALISE)
        tasks = {
            (data, name, system, seed): Case(system, data, rate, self._fewer, seed, *model)
            for data, rate in TABLE_3.items() for name, model in models.items() for system in systems
            for seed in self._seeds
        }  # fmt: skip
        found = self._runs.results("Table 3", cases.serve, self._data, tasks.values())
        speeds = {key: found[task]["speed"] for key, task in tasks.items()}
        return {
            data: {
                name: {system: self._speed(speeds, data, name, system) for system in systems} for name in models
            }
            for data in TABLE_3
        }  # fmt: skip

    def _speed(self, speeds: Mapping[Any, float], data: str, name: str, system: str) -> dict[str, Estimate | None]:
        own, base = ([speeds[data, name, one, seed] for seed in self._seeds] for one in (system, VLLM))
        return {"speed": estimate(own), "gain": ratio(own, base)}
