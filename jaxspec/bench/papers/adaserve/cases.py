"""AdaServe's simulations: one case is a system, a model, a load and a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from jaxspec.bench.papers.adaserve.requests import MIX, NAMES, TARGETS, Categories
from jaxspec.bench.papers.adaserve.systems import FITTED, SEPARATE, simulation
from jaxspec.bench.papers.presets import Preset
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.cost import LLAMA2_A100, Machine, StepLoad
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload

#: Fig. 9: requests that decode at once, and output tokens of each.
CROWD, WRITTEN = 32, 128


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    rate: requests per second; shares: of the categories; scale: strict SLO relative to the baseline latency; first:
    chance of the drafter's first candidate, mean and spread; short: the table of lengths of strict and of relaxed
    requests, by default the model's own.
    """

    system: str
    model: str
    rate: float
    seed: int
    shares: tuple[float, ...] = MIX
    scale: float = 1.0
    first: tuple[float, float] = FITTED
    short: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """systems: presets by name; short: lengths of short requests by model, or by another name; long: of long ones;
    trace: the arrivals, of which each seed gets a part that begins at random; minutes: how long requests arrive."""

    systems: Mapping[str, Preset]
    short: Mapping[str, Lengths]
    long: Lengths
    trace: Sequence[Arrival]
    minutes: float

    def workload(self, case: Case) -> tuple[Workload, np.ndarray]:
        """The requests, the same for every system, and their categories `[requests]`."""
        rng = np.random.default_rng([case.seed, round(1000 * case.rate)])
        count = max(2, round(60 * self.minutes * case.rate))
        short = self.short[case.short or case.model]
        targets = case.scale * baseline(LLAMA2_A100[case.model]), *TARGETS[case.model]
        categories = Categories((short, self.long, short), targets)
        return categories.workload(arrivals.part(self.trace, count, case.rate, rng), case.shares, rng)


def baseline(machine: Machine) -> float:
    """Baseline latency: seconds of a decode step of eight requests with 32 input and 128 output tokens (§6.1)."""
    return machine.cost.seconds(StepLoad(8, 0, 8 * (32 + 128 // 2)))


def serve(data: Data, case: Case) -> dict[str, float | None]:
    """`summary` of one case. SepPipe has a machine for each category and thrice the requests (§6.3)."""
    machine, system = LLAMA2_A100[case.model], data.systems[case.system]
    if case.system != SEPARATE:
        work, kind = data.workload(case)
        return summary([simulation(system, machine, work, case.seed, case.first).run()], [kind])
    work, kind = data.workload(replace(case, rate=len(NAMES) * case.rate))
    kinds = [kind[kind == k] for k in range(len(NAMES)) if (kind == k).any()]
    served = [simulation(system, machine, only(work, kind == own[0]), case.seed, case.first).run() for own in kinds]
    return summary(served, kinds, machines=len(NAMES))


def only(work: Workload, rows: np.ndarray) -> Workload:
    """The requests of these rows `[requests]`."""
    assert work.tpot is not None and work.max_tokens is not None
    return Workload(
        work.arrival[rows], work.input[rows], work.output[rows], work.predicted[rows], work.tpot[rows],
        work.max_tokens[rows],
    )  # fmt: skip


def summary(parts: Sequence[Served], kinds: Sequence[np.ndarray], machines: int = 1) -> dict[str, float | None]:
    """SLO attainment overall and per category, goodput and throughput in tokens/s per machine, mean TTFT in seconds,
    accepted (bonus token included) and drafted tokens per verification.

    Tokens count that are generated until the last arrival: after it one long answer would decide about the rates.
    Requests with one output token have no TPOT: they count neither for attainment nor for goodput.
    """
    every = lambda column: np.concatenate([column(served) for served in parts])  # noqa: E731
    output, met, kind = every(lambda s: s.workload.output), every(lambda s: s.met), np.concatenate(kinds)
    timed = output > 1
    share = lambda rows: float(met[rows & timed].mean()) if (rows & timed).any() else None  # noqa: E731
    begun = min(float(s.workload.arrival[0]) for s in parts)
    end = max(float(s.workload.arrival[-1]) for s in parts)
    tokens = generated(every(lambda s: s.first_token), every(lambda s: s.finished), output, end)
    seconds = machines * (end - begun)
    rounds = max(1, sum(int(s.rounds.sum()) for s in parts))
    return {
        "attainment": share(timed), **{name: share(kind == k) for k, name in enumerate(NAMES)},
        "goodput": float(tokens[met & timed].sum()) / seconds, "throughput": float(tokens.sum()) / seconds,
        "ttft": float(every(lambda s: s.first_token - s.workload.arrival).mean()),
        "accepted": 1 + sum(float(s.accepted.sum()) for s in parts) / rounds,
        "drafted": sum(float(s.drafted.sum()) for s in parts) / rounds,
    }  # fmt: skip


def generated(first_token: np.ndarray, finished: np.ndarray, output: np.ndarray, end: float) -> np.ndarray:
    """Tokens of each request until the time `end`, evenly spread from its first token to its last; all `[requests]`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.nan_to_num(np.clip((end - first_token) / (finished - first_token), 0, 1), nan=1.0)
    return np.where(first_token <= end, 1 + (output - 1) * share, 0)


def breakdown(data: Data, case: Case) -> dict[str, float]:
    """Milliseconds per step with many requests (Fig. 9): selection (measured here), drafter and target (simulated)."""
    machine, short = LLAMA2_A100[case.model], data.short[case.model]
    rows = np.random.default_rng(case.seed).integers(len(short), size=CROWD)
    tpot = np.array([baseline(machine), *TARGETS[case.model]])[np.arange(CROWD) % 3]
    unknown = np.full(CROWD, np.nan)
    work = Workload(np.zeros(CROWD), short.input[rows], np.full(CROWD, WRITTEN), unknown, tpot)
    run = simulation(data.systems[case.system], machine, work, case.seed, case.first)
    assert run.speculator is not None
    (drafter,), spent = run.drafters, dict[str, float]()
    for owner, what in ((run.speculator, "lookahead"), (run.speculator, "draft"), (drafter, "propose")):
        setattr(owner, what, timed(getattr(owner, what), what, spent))
    served = run.run()
    # The simulated drafter runs on the host too, and is not part of the selection.
    selection = spent["lookahead"] + spent["draft"] - spent["propose"]
    per_step = 1e3 / served.steps
    return {
        "selection": per_step * selection, "drafter": per_step * run.drafting,
        "target": per_step * (served.busy - run.drafting),
    }  # fmt: skip


def timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """`call`, adding its seconds to `spent[name]`."""

    def measured(*args: Any) -> Any:
        begun = perf_counter()
        try:
            return call(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + perf_counter() - begun

    return measured
