"""ALISE (Zhao & Wang 2024): shortest remaining time first with KV swapped by estimated wait, against FCFS.

Models of the paper on one V100 or two serve Poisson arrivals (§4.1) with Alpaca's and ShareGPT's lengths. Batches are
as large as memory allows. Throughput is the rate at which the normalised latency, the mean over requests of latency
per output token, reaches 200 ms (§4.2), found by bisection.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.estimates import Estimate, estimate, means, ratio, reduction
from jaxspec.bench.papers import page
from jaxspec.bench.papers.alise import cases, engine, report, runtime
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
    OTHERS,
    PROXY,
    SWAP_KNOWN,
    UNREAD,
    VLLM,
    WORSE,
)  # fmt: skip
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
#: Minutes of a trace: in the paper, of variations, and with --quick. Alpaca has sixteen times ShareGPT's rate.
MINUTES = 30.0
FEWER, FEWEST = {"alpaca": 4.0, "sharegpt": 10.0}, {"alpaca": 0.5, "sharegpt": 2.0}
#: §4.2's constraint on the normalised latency, seconds per token.
LIMIT = 0.2
#: The first rate, in requests per second, that a search for a knee tries.
START = {"alpaca": 16.0, "sharegpt": 1.0}
#: Relative distance of the second rate tried from the first, if a similar search has found that one.
NEAR = 1.1
#: Rates of a figure relative to the one at which FCFS, as vLLM, saturates.
LOADS, FEW_LOADS = (0.4, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0), (0.7, 1.0, 1.3)
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
MAIN = VLLM, ALISE
#: The headlines' model and number of V100.
FIRST = "opt-13b", 1


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
    return engine.measure(args, tables, {VLLM: SYSTEMS[VLLM], **MEMORY_SYSTEMS, SWAP_KNOWN: SYSTEMS[KNOWN]}, ERROR)


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
        minutes: float = args.minutes
        self._fewer = {data: min(minutes, (FEWEST if args.quick else FEWER)[data]) for data in DATA}
        self._minutes = self._fewer if args.quick else dict.fromkeys(DATA, minutes)
        self._seeds = range(args.seed, args.seed + (args.seeds or (QUICK if args.quick else SEEDS)))
        #: Knees by (system, data, model, devices, minutes): one per seed.
        self._knees: dict[tuple[str, str, str, int, float], list[float]] = {}

    def measure(self) -> dict[str, Any]:
        others = [FULL, ORCA, KNOWN] if self._quick else [FULL, ORCA, PROXY, WORSE, KNOWN, AGED, UNREAD]
        models = {} if self._quick else MODELS
        self._search(
            [(s, *FIRST) for s in (*MAIN, *self._own, *others)]
            + [(s, name, devices) for s in MAIN for name, devices in models.values() if (name, devices) != FIRST]
        )
        self._search_longer([(s, *FIRST) for s in (*MAIN, *self._own)])
        variations = {
            data: {name: self._gain(name, data, FIRST, self._fewer) for name in (*MAIN, *others)} for data in DATA
        }
        by_model = {name: self._gains(model, self._fewer) for name, model in models.items()}
        return {
            "minutes": self._minutes, "fewer": self._fewer, "seeds": len(self._seeds), "limit": LIMIT,
            "main": self._gains(FIRST, self._minutes), "models": by_model, "variations": variations,
            "curves": self._curves(), "memory": self._memory(), "latency": self._latency(),
            "runtime": self._runtime(), "table 3": {} if self._quick else self._table_3(),
        }  # fmt: skip

    def _search(self, wanted: Iterable[tuple[str, str, int]]) -> None:
        """Find the knees of (system, model, devices) for both data sets: the first seed's, then the others' near it."""
        first, *rest = self._seeds
        cases = {
            (system, data, model, devices): Case(
                system, data, START[data], self._fewer[data], first, model, devices
            )
            for system, model, devices in wanted for data in DATA
        }  # fmt: skip
        found = self._find("knees, first seed", {key: [Knee(case, LIMIT)] for key, case in cases.items()})
        others = {
            key: [Knee(replace(case, rate=found[key][0] or case.rate, seed=seed), LIMIT, NEAR) for seed in rest]
            for key, case in cases.items()
        }
        more = self._find("knees, other seeds", others)
        for (system, data, model, devices), case in cases.items():
            key = system, data, model, devices
            self._knees[(*key, case.minutes)] = found[key] + more[key]

    def _search_longer(self, wanted: Iterable[tuple[str, str, int]]) -> None:
        """Find the knees of the main traces near those of the shorter ones."""
        if self._minutes == self._fewer:
            return
        tasks = {
            (system, data, model, devices): [
                Knee(Case(system, data, near or START[data], self._minutes[data], seed, model, devices), LIMIT, NEAR)
                for seed, near in zip(
                    self._seeds, self._knees[system, data, model, devices, self._fewer[data]], strict=True
                )
            ]
            for system, model, devices in wanted for data in DATA
        }  # fmt: skip
        for key, rates in self._find("knees, main traces", tasks).items():
            self._knees[(*key, self._minutes[key[1]])] = rates

    def _find(self, what: str, tasks: Mapping[Any, list[Knee]]) -> dict[Any, list[float]]:
        found = self._runs.results(what, cases.find_knee, self._data, [one for own in tasks.values() for one in own])
        return {key: [found[one]["rate"] for one in own] for key, own in tasks.items()}

    def _gain(
        self, system: str, data: str, model: tuple[str, int], minutes: Mapping[str, float]
    ) -> dict[str, Estimate | None]:
        own, base = (self._knees[name, data, *model, minutes[data]] for name in (system, VLLM))
        return {"rate": estimate(own), "gain": ratio(own, base)}

    def _gains(self, model: tuple[str, int], minutes: Mapping[str, float]) -> dict[str, Any]:
        systems = (*MAIN, *self._own) if model == FIRST else MAIN
        return {data: {name: self._gain(name, data, model, minutes) for name in systems} for data in DATA}

    def _rates(self, loads: tuple[float, ...]) -> dict[str, list[float]]:
        """Requests per second relative to the knee of FCFS, as vLLM, by data set."""
        knees = {data: np.mean(self._knees[VLLM, data, *FIRST, self._fewer[data]]) for data in DATA}
        return {data: [round(load * float(knees[data]), 2) for load in loads] for data in DATA}

    def _at_loads(self, systems: tuple[str, ...], loads: tuple[float, ...]) -> dict[str, Any]:
        """`{data: {system: {rate: estimates}}}` at rates relative to the knee of FCFS, as vLLM."""
        rates = self._rates(loads)
        tasks = {
            (data, system, rate, seed): Case(system, data, rate, self._fewer[data], seed)
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
        return self._at_loads(MEMORIES, FEW_LOADS if self._quick else LOADS[3:6])

    def _latency(self) -> dict[str, Any]:
        """Fig. 9: OPT-13B on ShareGPT at the rate at which FCFS reaches the limit."""
        minutes = self._minutes["sharegpt"]
        rate = float(np.mean(self._knees[VLLM, "sharegpt", *FIRST, minutes]))
        tasks = {(name, seed): Case(name, "sharegpt", rate, minutes, seed) for name in MAIN for seed in self._seeds}
        found = self._runs.results("latencies (Fig. 9)", cases.serve_sample, self._data, tasks.values())
        by_system = {name: [found[tasks[name, seed]]["means"] for seed in self._seeds] for name in MAIN}
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
            "sample": {name: found[tasks[name, self._seeds[0]]]["sample"] for name in (VLLM, ALISE)},
        }  # fmt: skip

    def _runtime(self) -> dict[str, Any]:
        """Fig. 5, and Eq. 3 to 5 while requests are served: `{data: {rate: estimates}}`."""
        alone = {outputs: runtime.Alone(FIRST[0], VLLM, outputs) for outputs in runtime.OUTPUTS}
        found = self._runs.results("requests alone (Fig. 5)", runtime.alone, self._data, alone.values())
        rates = self._rates((0.5, 1.0))
        tasks = {
            (data, rate, seed): Case(ALISE, data, rate, self._fewer[data], seed)
            for data in DATA for rate in rates[data] for seed in self._seeds
        }  # fmt: skip
        served = self._runs.results("estimated times (Eq. 3)", runtime.estimated, self._data, tasks.values())
        return {
            "prompts": runtime.PROMPTS,
            "alone": {
                outputs: {stage: {"seconds": found[task][stage]} | runtime.line(found[task][stage])
                          for stage in ("prefill", "decode")}
                for outputs, task in alone.items()
            },
            "served": {
                data: {f"{rate:g}": means([served[tasks[data, rate, seed]] for seed in self._seeds])
                       for rate in rates[data]}
                for data in DATA
            },
        }  # fmt: skip

    def _table_3(self) -> dict[str, Any]:
        """Table 3: tokens per second of a request at its rates."""
        systems = (ORCA, VLLM, ALISE)
        tasks = {
            (data, name, system, seed): Case(system, data, rate, self._fewer[data], seed, *model)
            for data, rate in TABLE_3.items() for name, model in OTHERS.items() for system in systems
            for seed in self._seeds
        }  # fmt: skip
        found = self._runs.results("Table 3", cases.serve, self._data, tasks.values())
        speeds = {key: found[task]["speed"] for key, task in tasks.items()}
        return {
            data: {
                name: {system: self._speed(speeds, data, name, system) for system in systems} for name in OTHERS
            }
            for data in TABLE_3
        }  # fmt: skip

    def _speed(self, speeds: Mapping[Any, float], data: str, name: str, system: str) -> dict[str, Estimate | None]:
        own, base = ([speeds[data, name, one, seed] for seed in self._seeds] for one in (system, VLLM))
        return {"speed": estimate(own), "gain": ratio(own, base)}
