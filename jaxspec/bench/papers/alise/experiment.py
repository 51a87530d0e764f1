"""ALISE (Zhao & Wang 2024): shortest remaining time first with KV swapped by estimated wait, against FCFS.

OPT-13B on one V100 (Fig. 2) serving 30 minutes of Poisson arrivals (§4.1) of Alpaca's and ShareGPT's lengths. All
batches are as large as memory allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.alise.report import (
    AGAIN,
    ALISE,
    AUTO,
    DATA,
    DEFER,
    FULL,
    KNOWN,
    ORCA,
    SWAP,
    VLLM,
    WORSE,
    at_latency,
    draw,
    sections,
)
from jaxspec.bench.papers.serving import PAGE_SIZE, engines, prompt_ids, turns
from jaxspec.errors import explained
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import OPT_V100, Machine
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Lengths, Workload, join, noisy, read_lengths

MODEL = "opt-13b"
#: Positions that an OPT model was trained on; longer requests are left out.
CONTEXT = 2048
#: Requests a second.
RATES: Mapping[str, Sequence[float]] = {
    "alpaca": (2, 6, 10, 14, 18, 22, 26, 32, 40),
    "sharegpt": (0.15, 0.3, 0.45, 0.65, 0.85, 1.1, 1.4, 1.8, 2.3, 3.0),
}
#: Nobody is asked how much worse than this it gets at higher rates, in seconds a token.
CEILING = 0.45
#: §4.2's constraint, seconds a token.
LIMIT = 0.2
#: Log-normal error whose mean is Table 2's for OPT-13B (0.123 of the length); and one as of SSJF's predictor.
ERROR, LARGE_ERROR = 0.154, 0.5
#: Requests that a step may be full of, and prompt tokens that it computes beside decoding.
CONCURRENCY, BUDGET = 256, 512
HOST_BYTES = 64 * 2**30
#: Consecutive requests of Fig. 9.
SAMPLE = 200

#: By rate: the normalised latency and what went with it.
Curve = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class System:
    """What is compared. `kv`: of the bytes of half precision; `reserving`: room for the longest request is set aside
    for each; `error`: of the predictions, None: known."""

    policy: Mapping[str, Any]
    kv: float = 0.5
    reserving: bool = False
    error: float | None = None


def alise(memory: str) -> dict[str, Any]:
    return {"order": "alise", "memory": memory, "predictor": "oracle"}


#: Fig. 6. The paper keeps ALISE's KV at INT8, and vLLM's as vLLM does.
SYSTEMS = {
    ORCA: System({"order": "fcfs", "memory": "recompute"}, kv=1.0, reserving=True),
    VLLM: System({"order": "fcfs", "memory": "recompute"}, kv=1.0),
    FULL: System(alise("swap"), kv=1.0, error=ERROR),
    ALISE: System(alise("swap"), error=ERROR),
    WORSE: System(alise("swap"), error=LARGE_ERROR),
    KNOWN: System(alise("swap")),
}
#: Fig. 8.
MEMORIES = {
    DEFER: System(alise("defer"), error=ERROR),
    AGAIN: System(alise("recompute"), error=ERROR),
    SWAP: System(alise("swap"), error=ERROR),
    AUTO: System(alise("auto"), error=ERROR),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--alpaca", required=True, metavar="JSONL", help='{"turns": [text], "reference": text} a line')
    data.add_argument("--sharegpt", required=True, metavar="CSV", help="input_tokens, output_tokens")
    data.add_argument("--minutes", type=options.positive, default=30.0, metavar="M", help="of arrivals (default: 30)")
    engine = parser.add_argument_group("of --engine")
    engine.add_argument("--engine-jobs", type=options.count, default=100, metavar="N", help="default: 100")
    tokens = "prompt and answer of a mean request; the data's lengths are scaled to it (70)"
    engine.add_argument("--engine-tokens", type=options.count, default=70, metavar="N", help=tokens)
    engine.add_argument(
        "--engine-rate", type=options.positive, default=18.0, metavar="R", help="requests a second (18)"
    )
    kv = "KV positions (480); requests of more than half of them are left out"
    engine.add_argument("--engine-kv", type=options.count, default=480, metavar="N", help=kv)


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where the data cannot be read or nothing can be run."""
    out = Path(args.out)
    try:
        tables = {name: fitting(read_lengths(getattr(args, name))) for name in DATA}
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if args.engine:
        kind, numbers = "engine", on_engine(args, tables)
    else:
        kind, numbers = "simulated", simulated(args, tables)
    kept = page.keep(out / "alise.json", kind, numbers, args.json)
    page.write(out / "alise.md", "ALISE", sections(kept))
    if kind == "simulated":
        draw(out, kept["simulated"])
    return 0


def fitting(table: Lengths) -> Lengths:
    """Those that the model has room for. Raises ValueError where none do."""
    rows = (table.input > 0) & (table.input + table.output <= CONTEXT)
    if not rows.any():
        raise ValueError(f"no request of at most {CONTEXT} tokens, prompt and answer together")
    return Lengths(table.input[rows], table.output[rows], table.predicted[rows])


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Normalised latencies in seconds a token by rate, and of Fig. 9's sample each request's latency in seconds."""
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
        rate = at_latency(by_rate, LIMIT) or max(map(float, by_rate))
        work = workload(tables["sharegpt"], rate, seconds, seed)
        for name in (VLLM, FULL, ALISE, KNOWN):
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
    """The same requests at the same times for every system."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    return join(arrivals.poisson(max(1, round(rate * seconds)), rate, rng), table, 32, rng)


def curve(system: System, table: Lengths, rates: Sequence[float], seconds: float, seed: int) -> Curve:
    """By rate, up to the first at which the normalised latency is above `CEILING`."""
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
    """Serve `work`, whose longest request of all is `longest`."""
    if system.error is not None:
        work = work.predict(noisy(work.output, system.error, np.random.default_rng(seed)))
    positions = machine.positions(system.kv)
    concurrency = max(1, positions // longest) if system.reserving else CONCURRENCY
    policy = PolicyConfig.model_validate(system.policy)
    config = SchedulerConfig(
        concurrency, max(BUDGET, concurrency), CONTEXT, None, max(64, concurrency), policy,
        host_pages=int(HOST_BYTES / (PAGE_SIZE * machine.kv_bytes * system.kv)),
        costs=machine.swap_costs(PAGE_SIZE, system.kv),
    )  # fmt: skip
    pool = PagePool(positions // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False)
    return Simulation(Scheduler(config, pool), work, machine.cost).run()


def sample(served: Served) -> list[float]:
    """Latencies in seconds of `SAMPLE` consecutive requests from the middle of the trace, in order of arrival."""
    first = max(0, (len(served.jct) - SAMPLE) // 2)
    return [round(seconds, 3) for seconds in served.jct[first : first + SAMPLE].tolist()]


# --- on the engine ----------------------------------------------------------------------------------------------------


def on_engine(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Normalised latency in seconds a token and mean latency in seconds of each turn, `{data: {system: {…: [turns]}}}`.

    Fewer and shorter jobs and a small pool, so that memory is as scarce as in the paper.
    """
    from jaxspec.config import ConfigError, parse_overrides

    try:
        more = parse_overrides(args.set)
    except ConfigError as error:
        raise BenchError(str(error)) from None
    repeats = args.repeats or 5
    predicted = {"predictor": "noisy_oracle", "predictor_noise": ERROR}
    presets = {
        VLLM: {"order": "fcfs", "memory": "recompute"},
        **{name: {**alise(system.policy["memory"]), **predicted} for name, system in MEMORIES.items()},
        KNOWN: alise("auto"),
    }
    results: dict[str, Any] = {}
    with progress("turns", len(DATA) * len(presets) * (repeats + 1)) as advance:
        for data in DATA:
            table = scaled(tables[data], args.engine_tokens, args.engine_kv // 2)
            limits = {"draft": [], "kv_cache_tokens": args.engine_kv, "enable_prefix_caching": False}
            with engines({name: {**limits, **own, **more} for name, own in presets.items()}, args.model) as loaded:
                vocabulary = next(iter(loaded.values())).engine.model_config.vocab_size

                def jobs(
                    repeat: int, size: int = vocabulary, table: Lengths = table
                ) -> tuple[Workload, list[list[int]]]:
                    rng = np.random.default_rng([args.seed, repeat])
                    work = join(arrivals.poisson(args.engine_jobs, args.engine_rate, rng), table, 32, rng)
                    return work, prompt_ids(size, work.input.tolist(), rng)

                measured = turns(loaded, jobs, repeats, advance)
                swaps = {name: llm.engine.stats().preemptions for name, llm in loaded.items()}
            results[data] = {
                name: {
                    "normalised": [mean(m.e2e / m.output_tokens for m in turn if m.e2e) for turn in own],
                    "jct": [mean(m.e2e for m in turn if m.e2e) for turn in own],
                    "preemptions": swaps[name],
                    "working_set": [working_set(turn) for turn in own],
                }
                for name, own in measured.items()
            }
    return {
        "jobs": args.engine_jobs, "tokens": args.engine_tokens, "rate": args.engine_rate, "kv": args.engine_kv,
        "systems": results,
    }  # fmt: skip


def scaled(table: Lengths, tokens: int, longest: int) -> Lengths:
    """Requests of the same shape that are `tokens` long in the mean, without those longer than `longest`."""
    scale = tokens / (table.input + table.output).mean()
    inputs, outputs = (np.maximum(1, np.round(scale * column)).astype(int) for column in (table.input, table.output))
    fits = inputs + outputs <= longest
    return Lengths(inputs[fits], outputs[fits], table.predicted[fits])


def working_set(metrics: Sequence[RequestMetrics]) -> float:
    """The most KV positions of all requests that had come and not ended, those that waited included.

    A request's tokens are taken to come evenly between its first and its last.
    """
    ended = [m for m in metrics if m.first_token is not None and m.finished is not None]
    first, last = (np.array([getattr(m, name) for m in ended]) for name in ("first_token", "finished"))
    arrival, prompt, output = (
        np.array([getattr(m, name) for m in ended]) for name in ("arrival", "prompt_tokens", "output_tokens")
    )
    return max(
        float((prompt + output * np.clip((t - first) / np.maximum(last - first, 1e-9), 0, 1))[here].sum())
        for t in last
        for here in [(arrival <= t) & (t <= last)]
    )


def mean(values: Any) -> float:
    return float(np.mean(list(values)))
