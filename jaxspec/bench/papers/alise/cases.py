"""ALISE's simulated requests: one case is a system, a model on its devices, a data set, a rate and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from jaxspec.bench.estimates import knee
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import ALISE_MODELS, Machine, v100_machine
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Lengths, Workload, join, noisy

#: Context length of the models; longer requests are left out.
CONTEXT = 2048
#: `max_num_seqs` and the token budget.
CONCURRENCY, BUDGET = 256, 512
HOST_BYTES = 64 * 2**30
#: Consecutive requests of Fig. 9.
SAMPLE = 200


@dataclass(frozen=True, slots=True)
class System:
    """A system to compare.

    kv: bytes of KV relative to half precision; reserving: every request reserves KV for the longest one; error: σ of
    the length predictions' log-normal error, None: those of the preset's predictor.
    """

    preset: Preset
    kv: float = 0.5
    reserving: bool = False
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of `minutes` minutes of arrivals at `rate` requests per second."""

    system: str
    data: str
    rate: float
    minutes: float
    seed: int
    model: str = "opt-13b"
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Data:
    """systems, and tables of lengths, by name."""

    systems: Mapping[str, System]
    tables: Mapping[str, Lengths]
    variants: Variants


def serve(data: Data, case: Case) -> dict[str, float]:
    """Means over the requests: latency in seconds per output token, latency and time to first token in seconds; tokens
    per second of a request; what preemptions cost."""
    return _metrics(simulate(data, case))


def serve_sample(data: Data, case: Case) -> dict[str, Any]:
    """As `serve`, with the mean latency of the sample, under "means"; its latencies in seconds under "sample"."""
    served = simulate(data, case)
    seconds = sample(served)
    return {
        "means": _metrics(served) | {"sample": float(seconds.mean())},
        "sample": [round(one, 2) for one in seconds.tolist()],
    }


def _metrics(served: Served) -> dict[str, float]:
    work = served.workload
    return {
        "normalised": normalised(served), "jct": float(served.jct.mean()), "p99": float(np.quantile(served.jct, 0.99)),
        "ttft": float((served.first_token - work.arrival).mean()),
        "speed": float((work.output / served.jct).mean()), "throughput": len(work) / served.duration,
        "recomputed": served.recomputed / max(1, int((work.input + work.output).sum())),
        "swaps": served.swaps / len(work), "stalled": served.stalled / served.duration,
    }  # fmt: skip


def normalised(served: Served) -> float:
    """§4.1: mean over the requests of latency / output tokens, in seconds."""
    return float((served.jct / served.workload.output).mean())


def sample(served: Served) -> np.ndarray:
    """Latencies in seconds of `SAMPLE` consecutive requests from the middle of the trace, in arrival order."""
    first = max(0, (len(served.jct) - SAMPLE) // 2)
    return served.jct[first : first + SAMPLE]


@dataclass(frozen=True, slots=True)
class Knee:
    """The search for the rate at which the normalised latency reaches `limit`.

    The case's rate is the first tried; the next is `growth` times higher or lower.
    """

    case: Case
    limit: float
    growth: float = 1.4


def find_knee(data: Data, task: Knee) -> dict[str, float]:
    """The largest rate, in requests per second, at which the normalised latency is at most the limit."""

    def latency(rate: float) -> float:
        try:
            return normalised(simulate(data, replace(task.case, rate=rate), task.limit))
        except Exceeded:
            return inf

    return {"rate": knee(latency, task.limit, task.case.rate, tolerance=0.05, growth=task.growth)}


class Exceeded(Exception):
    """The normalised latency will be above the limit, whatever the other requests' latencies are."""


class Limited(Simulation):
    """Raises `Exceeded` as soon as the normalised latency must be above `limit`: most time of a search for a knee would
    go into runs far beyond it."""

    limit = inf
    _total = 0.0

    def _ended(self, request: Request) -> None:
        super()._ended(request)
        i = int(request.id)
        self._total += (self.ledger.finished[i] - request.arrival) / request.output_len
        if self._total > self.limit * len(self.workload):
            raise Exceeded


def simulate(data: Data, case: Case, limit: float = inf) -> Served:
    """Serve the case's requests. Raises `Exceeded` if the normalised latency is above `limit`."""
    run = prepare(data, case)
    run.limit = limit
    return run.run()


def prepare(data: Data, case: Case) -> Limited:
    """Every system gets the same requests at the same times. A request's `max_tokens` is what the context leaves."""
    system, table = data.systems[case.system], data.tables[case.data]
    machine = v100_machine(*ALISE_MODELS[case.model], devices=case.devices).with_kv(system.kv)
    # Separate streams: at another rate the same requests come in the same order, closer together.
    for_arrivals, for_lengths = np.random.default_rng(case.seed).spawn(2)
    count = max(1, round(60 * case.minutes * case.rate))
    work = join(data.variants.arrivals(count, case.rate, for_arrivals), table, 32, for_lengths)
    work = replace(work, max_tokens=CONTEXT - work.input)
    return simulation(system, machine, work, int((table.input + table.output).max()), case.seed)


def simulation(system: System, machine: Machine, work: Workload, longest: int, seed: int) -> Limited:
    """A system that serves these requests; `longest`: positions that it reserves per request if it reserves."""
    if system.error is not None:
        work = work.predict(noisy(work.output, system.error, np.random.default_rng([seed, 1])))
    concurrency = max(1, machine.positions // longest) if system.reserving else CONCURRENCY
    config = SchedulerConfig(
        concurrency, max(BUDGET, concurrency), CONTEXT, None, max(64, concurrency), system.preset.load().policy,
        host_pages=int(HOST_BYTES / (PAGE_SIZE * machine.kv_bytes)), costs=machine.swap_costs(PAGE_SIZE),
    )  # fmt: skip
    pool = PagePool(machine.positions // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False)
    return Limited(Scheduler(config, pool), work, machine.cost)
