"""ALISE (Zhao & Wang 2024): shortest remaining time first with KV swapped by estimated wait, against FCFS.

OPT-13B on one V100 (Fig. 2) serves 30 minutes of Poisson arrivals (§4.1) with Alpaca's and ShareGPT's lengths. Batches
are as large as memory allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.alise import report
from jaxspec.bench.papers.alise.report import DATA, KNOWN, VLLM, draw, sections
from jaxspec.bench.papers.headlines import Headline
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import PAGE_SIZE, random_jobs, turns
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import OPT_V100, Machine
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Lengths, Workload, join, noisy, read_lengths

MODEL = "opt-13b"
#: Context length of OPT models; longer requests are left out.
CONTEXT = 2048
#: Requests per second.
RATES: Mapping[str, Sequence[float]] = {
    "alpaca": (2, 6, 10, 14, 18, 22, 26, 32, 40),
    "sharegpt": (0.15, 0.3, 0.45, 0.65, 0.85, 1.1, 1.4, 1.8, 2.3, 3.0),
}
#: A curve ends at the first rate whose normalised latency exceeds this, in seconds per token.
CEILING = 0.45
#: §4.2's constraint on the normalised latency, seconds per token.
LIMIT = 0.2
#: σ of log-normal errors: one whose mean is Table 2's for OPT-13B (0.123 of the length), and one like SSJF's predictor.
ERROR, LARGE_ERROR = 0.154, 0.5
#: `max_num_seqs` and the token budget.
CONCURRENCY, BUDGET = 256, 512
HOST_BYTES = 64 * 2**30
#: Consecutive requests of Fig. 9.
SAMPLE = 200

#: Metrics by rate.
Curve = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class System:
    """A system to compare.

    kv: bytes of KV relative to half precision; reserving: every request reserves KV for the longest one; error: σ of
    the length predictions' log-normal error, None: true lengths.
    """

    preset: Preset
    kv: float = 0.5
    reserving: bool = False
    error: float | None = None


TITLE = "ALISE"
FILES = {
    "alpaca": File("prompts/alpaca.jsonl", "JSONL", 'lines of {"turns": [text], "reference": text}'),
    "sharegpt": File("lengths/sharegpt_first_round.csv", "CSV", "columns input_tokens, output_tokens"),
}


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    return []


def alise(memory: str) -> Preset:
    return Preset("alise").but(memory=memory, predictor="oracle", aging_ms=None)


FIRST_COME = Preset("fcfs").but(memory="recompute")
#: Fig. 6. In the paper ALISE's KV is INT8, and vLLM's FP16.
SYSTEMS = {
    report.ORCA: System(FIRST_COME, kv=1.0, reserving=True),
    VLLM: System(FIRST_COME, kv=1.0),
    report.FULL: System(alise("swap"), kv=1.0, error=ERROR),
    report.ALISE: System(alise("swap"), error=ERROR),
    report.WORSE: System(alise("swap"), error=LARGE_ERROR),
    KNOWN: System(alise("swap")),
}
#: Fig. 8: ALISE with other memory policies.
MEMORIES = {memory: System(alise(memory), error=ERROR) for memory in report.MEMORIES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("load")
    options.add_numbers(data, ("--minutes M", 30.0, "length of the arrival trace"))
    options.add_numbers(
        parser.add_argument_group("with --engine"),
        ("--engine-jobs N", 100, "requests per turn"),
        ("--engine-tokens N", 70, "mean tokens of prompt and answer together; the data's lengths are scaled to it"),
        ("--engine-rate R", 18.0, "requests/s"),
        ("--engine-kv N", 480, "KV positions; requests longer than half of them are left out"),
    )


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(args, TITLE, FILES, read, lambda args, _, *data: simulated(args, *data), on_engine, sections, draw)


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths]]:
    """Lengths by data set. Raises OSError or ValueError."""
    return ({name: fitting(read_lengths(getattr(args, name))) for name in DATA},)


def fitting(table: Lengths) -> Lengths:
    """Requests within the model's context. Raises ValueError if there are none."""
    rows = (table.input > 0) & (table.input + table.output <= CONTEXT)
    if not rows.any():
        raise ValueError(f"no request of at most {CONTEXT} tokens, prompt and answer together")
    return Lengths(table.input[rows], table.output[rows], table.predicted[rows])


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Normalised latencies in seconds per token by rate, and the latencies in seconds of Fig. 9's requests."""
    seconds, seed = 60 * args.minutes, args.seed
    curves: dict[str, dict[str, dict[str, Curve]]] = {"Fig. 6": {}, "Fig. 8": {}}
    samples: dict[str, Any] = {}
    with progress("curves", len(DATA) * (len(SYSTEMS) + len(MEMORIES)) + 1) as advance:
        for figure, systems in (("Fig. 6", SYSTEMS), ("Fig. 8", MEMORIES)):
            for data in DATA:
                found = curves[figure][data] = {}
                for name, system in systems.items():
                    found[name] = curve(system, tables[data], RATES[data], seconds, seed)
                    advance()
        by_rate = {rate: point["normalised"] for rate, point in curves["Fig. 6"]["sharegpt"][VLLM].items()}
        rate = report.at_latency(by_rate, LIMIT) or max(map(float, by_rate))
        work = workload(tables["sharegpt"], rate, seconds, seed)
        for name in (VLLM, report.FULL, report.ALISE, KNOWN):
            served = serve(SYSTEMS[name], OPT_V100[MODEL], work, CONTEXT, seed)
            samples[name] = {"mean": float(served.jct.mean()), "sample": sample(served)}
        advance()
    longest = {data: int((table.input + table.output).max()) for data, table in tables.items()}
    return {
        "minutes": args.minutes, "model": MODEL, "limit": LIMIT, "longest": longest,
        "positions": {str(kv): OPT_V100[MODEL].positions(kv) for kv in (1.0, 0.5)},
        "curves": curves, "latency": {"rate": rate, "systems": samples},
    }  # fmt: skip


def workload(table: Lengths, rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals with lengths drawn from the table, the same for every system."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    return join(arrivals.poisson(max(1, round(rate * seconds)), rate, rng), table, 32, rng)


def curve(system: System, table: Lengths, rates: Sequence[float], seconds: float, seed: int) -> Curve:
    """Metrics by rate, up to the first rate whose normalised latency exceeds `CEILING`."""
    points: Curve = {}
    longest = int((table.input + table.output).max())
    for rate in rates:
        work = workload(table, rate, seconds, seed)
        served = serve(system, OPT_V100[MODEL], work, longest, seed)
        points[str(rate)] = {
            "normalised": float((served.jct / work.output).mean()), "jct": float(served.jct.mean()),
            "recomputed": served.recomputed / max(1, int((work.input + work.output).sum())),
            "swaps": served.swaps / len(work), "stalled": served.stalled / served.duration,
        }  # fmt: skip
        if points[str(rate)]["normalised"] > CEILING:
            break
    return points


def serve(system: System, machine: Machine, work: Workload, longest: int, seed: int) -> Served:
    """Simulate `work` on one system; `longest`: positions that a reserving system reserves per request."""
    if system.error is not None:
        work = work.predict(noisy(work.output, system.error, np.random.default_rng(seed)))
    positions = machine.positions(system.kv)
    concurrency = max(1, positions // longest) if system.reserving else CONCURRENCY
    config = SchedulerConfig(
        concurrency, max(BUDGET, concurrency), CONTEXT, None, max(64, concurrency), system.preset.load().policy,
        host_pages=int(HOST_BYTES / (PAGE_SIZE * machine.kv_bytes * system.kv)),
        costs=machine.swap_costs(PAGE_SIZE, system.kv),
    )  # fmt: skip
    pool = PagePool(positions // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False)
    return Simulation(Scheduler(config, pool), work, machine.cost).run()


def sample(served: Served) -> list[float]:
    """Latencies in seconds of `SAMPLE` consecutive requests from the middle of the trace, in arrival order."""
    first = max(0, (len(served.jct) - SAMPLE) // 2)
    return [round(seconds, 3) for seconds in served.jct[first : first + SAMPLE].tolist()]


# --- on the engine ----------------------------------------------------------------------------------------------------


def on_engine(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Normalised latency in seconds per token and mean latency in seconds, `{data: {system: {…: [turns]}}}`.

    Fewer and shorter requests and a small pool, so that memory is as scarce as in the paper. Raises `BenchError`.
    """
    repeats = args.repeats or 5
    settings = {
        "draft": [], "kv_cache_tokens": args.engine_kv, "enable_prefix_caching": False, **overrides(args),
    }  # fmt: skip
    presets = {
        VLLM: FIRST_COME,
        **{
            name: system.preset.but(predictor="noisy_oracle", predictor_noise=ERROR)
            for name, system in MEMORIES.items()
        },
        KNOWN: alise("auto"),
    }
    results: dict[str, Any] = {}
    with progress("turns", len(DATA) * len(presets) * (repeats + 1)) as advance:
        for data in DATA:
            table = scaled(tables[data], args.engine_tokens, args.engine_kv // 2)
            with engines({name: preset.but(**settings) for name, preset in presets.items()}, args.model) as loaded:
                jobs = random_jobs(loaded, table, args.engine_jobs, args.engine_rate, args.seed)
                measured = turns(loaded, jobs, repeats, advance)
                preemptions = {name: llm.engine.stats().preemptions for name, llm in loaded.items()}
            results[data] = {
                name: {
                    "normalised": [mean(m.e2e / m.output_tokens for m in turn if m.e2e) for turn in metrics],
                    "jct": [mean(m.e2e for m in turn if m.e2e) for turn in metrics],
                    "preemptions": preemptions[name],
                    "working_set": [working_set(turn) for turn in metrics],
                }
                for name, metrics in measured.items()
            }
    return {
        "jobs": args.engine_jobs, "tokens": args.engine_tokens, "rate": args.engine_rate, "kv": args.engine_kv,
        "systems": results,
    }  # fmt: skip


def scaled(table: Lengths, tokens: int, longest: int) -> Lengths:
    """Lengths scaled to a mean of `tokens` for prompt and answer together, without requests longer than `longest`."""
    scale = tokens / (table.input + table.output).mean()
    inputs, outputs = (np.maximum(1, np.round(scale * column)).astype(int) for column in (table.input, table.output))
    fits = inputs + outputs <= longest
    return Lengths(inputs[fits], outputs[fits], table.predicted[fits])


def working_set(metrics: Sequence[RequestMetrics]) -> float:
    """Peak KV positions of all requests in the system, waiting ones included.

    Assumes that a request's tokens are evenly spaced between its first and its last.
    """
    done = [m for m in metrics if m.first_token is not None and m.finished is not None]
    first, last = (np.array([getattr(m, name) for m in done]) for name in ("first_token", "finished"))
    arrival, prompt, output = (
        np.array([getattr(m, name) for m in done]) for name in ("arrival", "prompt_tokens", "output_tokens")
    )
    return max(
        float((prompt + output * np.clip((t - first) / np.maximum(last - first, 1e-9), 0, 1))[present].sum())
        for t in last
        for present in [(arrival <= t) & (t <= last)]
    )


def mean(values: Any) -> float:
    return float(np.mean(list(values)))
