"""SPIN's simulated requests: one case is a system, a data set, models and their times, and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.bench.papers.spin import systems
from jaxspec.bench.papers.spin.difficulty import SSMS, Dataset, Requests
from jaxspec.bench.papers.spin.oracle import Heard
from jaxspec.bench.papers.spin.systems import CONCURRENCY, System
from jaxspec.bench.papers.spin.times import CALIBRATIONS, LLM, MEASURED
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.cost import LLAMA_V100, Cost, StepLoad
from jaxspec.sched.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    jobs: requests, all there from the start, or at `rate` per second if that is positive. times: one of
    `CALIBRATIONS`. residual, output: as in `Dataset.differing` and `writing`, if given.
    """

    system: str
    data: str
    seed: int
    jobs: int
    llm: str = LLM
    times: str = MEASURED
    concurrency: int = CONCURRENCY
    rate: float = 0.0
    residual: float | None = None
    output: int | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """Systems and data sets by name."""

    systems: Mapping[str, System]
    datasets: Mapping[str, Dataset]
    variants: Variants


class Log:
    """Wraps a cost model and records the loads."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.loads: list[StepLoad] = []

    def seconds(self, load: StepLoad) -> float:
        self.loads.append(load)
        return self._cost.seconds(load)

    def verifying(self) -> list[StepLoad]:
        """Decode steps while requests waited for a slot, without the loads of `step_times`, which have no context."""
        last = max(i for i, load in enumerate(self.loads) if load.starting)
        return [load for load in self.loads[:last] if load.context and not load.starting]


def requests(data: Data, case: Case) -> Requests:
    """The requests of a case: the same for all systems."""
    dataset = data.datasets[case.data]
    if case.residual is not None:
        dataset = dataset.differing(case.residual)
    if case.output is not None:
        dataset = dataset.writing(case.output)
    found = dataset.requests(max(case.jobs, 6 * case.concurrency), case.seed)
    if not case.rate:
        return found
    rng = np.random.default_rng([case.seed, 1])
    arrived = data.variants.arrivals(len(found.work), case.rate, rng)
    return replace(found, work=replace(found.work, arrival=np.array([one.time for one in arrived])))


def serve(data: Data, case: Case) -> dict[str, float]:
    """Goodput (`systems.goodput`), mean seconds to the first token and to the last, requests per second, accepted
    tokens per verification, and all tokens per second of the slots' own time (`own`, see `Heard`)."""
    given, costs = requests(data, case), CALIBRATIONS[case.times]
    run = systems.simulation(data.systems[case.system], costs, case.llm, given, case.seed, case.concurrency)
    heard = None
    if run.speculator is not None and run.speculator.choice is not None:
        run.speculator.assign_by(heard := Heard(run.speculator.choice))
    served = run.run()
    return {
        **systems.goodput(served), "ttft": float((served.first_token - given.work.arrival).mean()),
        "jct": float(served.jct.mean()), "requests": len(given.work) / served.duration,
        "round": float(served.accepted.sum()) / max(1, int(served.rounds.sum())),
        **({"own": case.concurrency * heard.tokens / heard.seconds} if heard and heard.seconds else {}),
    }  # fmt: skip


def verify(data: Data, case: Case) -> dict[str, float]:
    """Mean milliseconds, tokens and KV positions of a verification, and peak gigabytes of KV."""
    costs = CALIBRATIONS[case.times]
    log = Log(costs.targets[case.llm])
    logged = replace(costs, targets={case.llm: log})
    given = requests(data, case)
    systems.simulation(data.systems[case.system], logged, case.llm, given, case.seed, case.concurrency).run()
    loads = log.verifying()
    return {
        "ms": 1e3 * float(np.mean([costs.targets[case.llm].seconds(load) for load in loads])),
        "tokens": float(np.mean([load.tokens for load in loads])),
        "positions": float(np.mean([load.context for load in loads])),
        "gigabytes": max(load.context for load in loads) * LLAMA_V100[case.llm].kv_bytes / 1e9,
    }  # fmt: skip


#: Fig. 3: requests of a draw, and the tokens that each generates.
THREE, LONG = 3, 100


@dataclass(frozen=True, slots=True)
class Alone:
    """One of three requests of a data set served alone with one draft model; `draw`: seed of the requests."""

    ssm: str
    data: str
    draw: int
    number: int


def alone(data: Data, task: Alone) -> dict[str, float]:
    """Fig. 3: drafted tokens per second of drafting, share of them that was accepted, and seconds to the last token."""
    rates = data.datasets[task.data].requests(THREE, task.draw).rates[task.number]
    work = Workload(np.zeros(1), np.array([21]), np.array([LONG]), np.full(1, np.nan))
    run = systems.simulation(
        systems.VANILLA[task.ssm], CALIBRATIONS[MEASURED], LLM, Requests(work, rates[None]), task.draw, 1
    )
    served = run.run()
    drafted = int(served.drafted.sum())
    return {
        "speed": drafted / run.drafting, "accepted": float(served.accepted.sum()) / drafted,
        "latency": float(served.jct[0]), "rate": float(rates[SSMS.index(task.ssm)]),
    }  # fmt: skip
