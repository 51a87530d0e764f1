"""SSJF's simulated jobs: one case is an order, a load, a kind of batching and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.estimates import knee
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import simulate
from jaxspec.bench.papers.variants import Variants
from jaxspec.bench.prompts import WORDS_PER_TOKEN
from jaxspec.sched.sim import arrivals, json_lines
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.cost import SSJF, Cost, v100
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, join

CONCURRENCY = 4
#: Mean gap of Fig. 5 and 7 is 1 / this, in jobs per second.
CV_RATE = 0.03
#: Milliseconds that a batch waits to fill. The paper gives none; in the published code SJF never waits, and FCFS up to
#: 10 s. Here all orders wait equally long.
SHORT_WAIT, LONG_WAIT = 50.0, 10_000.0
#: Kinds of load: Poisson arrivals, ascending Gamma gaps as published, Gamma gaps in random order, arrivals of a trace.
RATE, CV, RANDOM_CV, TRACE = "rate", "cv", "cv, in random order", "trace"
#: The model whose step times the published experiments use, instead of one of Table 1.
VICUNA = "vicuna-13b"


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    order, table: names of a system and of its table of lengths and predictions. load: kind, with its rate or
    coefficient of variation `x`. wait: milliseconds that a batch waits to fill.
    """

    order: str
    table: str
    load: str
    x: float
    mode: str
    seed: int
    seats: int = CONCURRENCY
    jobs: int = 50
    wait: float = SHORT_WAIT
    model: str = VICUNA

    @property
    def cost(self) -> Cost:
        return SSJF if self.model == VICUNA else v100(self.model)


@dataclass(frozen=True, slots=True)
class Data:
    """systems: presets by name; tables: lengths with predictions by name; functions: path of the trace."""

    systems: Mapping[str, Preset]
    tables: Mapping[str, Lengths]
    functions: str
    variants: Variants


def serve(data: Data, case: Case) -> dict[str, float]:
    """Mean JCT and time to first token in seconds, jobs per second until a quarter and until all are done."""
    served = _serve(data, case)
    return {
        "jct": float(served.jct.mean()), "ttft": float((served.first_token - served.workload.arrival).mean()),
        "quarter": served.throughput_at(0.25), "throughput": len(served.workload) / served.duration,
        "p99": float(np.quantile(served.jct, 0.99)),
    }  # fmt: skip


def _serve(data: Data, case: Case) -> Served:
    # All orders and kinds of batching get the same jobs at the same times.
    rng = np.random.default_rng([case.seed, round(1000 * case.x)])
    work = join(_arrivals(data, case, rng), data.tables[case.table], 32, rng)
    seats = 1 if case.mode == "none" else case.seats
    preset = data.systems[case.order]
    policy = preset.load(batching=case.mode, max_batch_size=seats, batch_wait_timeout_ms=case.wait).policy
    served = simulate(policy, seats, work, case.cost)
    return returned_together(served) if case.mode == "dynamic" else served


def _arrivals(data: Data, case: Case, rng: np.random.Generator) -> list[Arrival]:
    if case.load == TRACE:
        return arrivals.part(arrivals.trace(data.functions), case.jobs, case.x, rng)
    if case.load == CV:
        return sorted_gaps(case.jobs, case.x, rng)
    if case.load == RANDOM_CV:
        return arrivals.gamma(case.jobs, CV_RATE, case.x, rng)
    return data.variants.arrivals(case.jobs, case.x, rng)


def sorted_gaps(jobs: int, cv: float, rng: np.random.Generator) -> list[Arrival]:
    """Arrivals with ascending Gamma gaps, as in the published code: nearly all jobs arrive at once."""
    times = [a.time for a in arrivals.gamma(jobs + 1, CV_RATE, cv, rng)]
    return [Arrival(float(t)) for t in np.cumsum(np.sort(np.diff(times)))]


def returned_together(served: Served) -> Served:
    """Requests that start together return together, when the last one is done (dynamic batching, Fig. 3)."""
    _, batch = np.unique(served.first_scheduled, return_inverse=True)
    ends = np.zeros(batch.max() + 1)
    np.maximum.at(ends, batch, served.finished)
    return served.ending(ends[batch])


@dataclass(frozen=True, slots=True)
class Knee:
    """The search for the rate at which the mean JCT reaches `limit` seconds; `case` without its rate."""

    case: Case
    limit: float


def find_knee(data: Data, task: Knee) -> dict[str, float]:
    """The largest rate in jobs per second at which the mean JCT is at most the limit."""
    case = task.case

    def jct(rate: float) -> float:
        return serve(data, replace(case, x=rate))["jct"]

    return {"rate": knee(jct, task.limit, case.x, tolerance=0.05)}


def read_rounds(path: str | Path, rounds: int) -> list[np.ndarray]:
    """Reply lengths in tokens of each of the first `rounds` rounds of conversations, estimated from words.

    Raises OSError, or ValueError naming the line.
    """

    def lengths(row: Any) -> list[int]:
        return [max(1, round(len(reply.split()) / WORDS_PER_TOKEN)) for reply in row["replies"][:rounds]]

    rows = json_lines.read(path, lengths, '"replies", a list of texts')
    found = [[row[i] for row in rows if len(row) > i] for i in range(rounds)]
    if not all(found):
        raise ValueError(f"{path}: no conversation has {rounds} rounds")
    return [np.array(replies) for replies in found]
