"""LAPS-SD's simulated requests: one case is a system, a workload and a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxspec.bench.estimates import knee
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import simulate
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.cost import LLAMA_7B_L20, Linear, StepLoad
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload, join

#: Drafts per round (n): chains of 8 as in SpecInfer, whose setup the paper follows.
DRAFTS = 8
#: With a switch every 80 ms of service, LAS spends as much time on switches as in Fig. 2 (see `sched/sim/cost.py`).
QUANTUM_MS = 80.0
#: Log-normal error of the predicted lengths: about that of the published SSJF predictor's accuracy (σ = 0.49, ssjf.md).
SIGMA = 0.5
#: Probability that a draft token is accepted if the one before it is. SpecInfer (Miao et al. 2024), Table 2: with
#: chains of 8 from LLaMA-68M, LLaMA-7B has a mean accepted length of 2.73 on Chatbot Instruction Prompts, that is 0.64.
#: LAPS-SD §5.2 says that MBPP has higher rates (assumed: 0.75) and nothing of MiniThinky (assumed: as the first). How
#: rates differ between requests and settle is shown for three requests without numbers, so the spread, and the
#: settling within about 150 tokens as in Fig. 3, are assumptions.
CHAT = Process(0.64, 0.15, wander=1.0, settle=50)
PROCESSES = {"chat": CHAT, "code": replace(CHAT, mean=0.75, spread=0.12), "math": CHAT}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    system, data: names of a system and of a table of lengths. count: number of requests. load: arrival rate relative to
    the capacity; None: all requests arrive at once. sigma: log-normal error of the predicted lengths; None: the table's
    own predictions. cap: `max_tokens`. swap: whether switches take time. laps: settings of the order `laps_sd`.
    """

    system: str
    data: str
    seed: int
    count: int
    load: float | None = None
    sigma: float | None = SIGMA
    process: Process = CHAT
    drafts: int = DRAFTS
    cap: int | None = None
    swap: bool = True
    quantum_ms: float = QUANTUM_MS
    laps: tuple[tuple[str, Any], ...] = ()

    @property
    def cost(self) -> Linear:
        return LLAMA_7B_L20 if self.swap else replace(LLAMA_7B_L20, swap=0.0)


@dataclass(frozen=True, slots=True)
class Data:
    """systems: presets by name; tables: lengths by name."""

    systems: Mapping[str, Preset]
    tables: Mapping[str, Lengths]
    variants: Variants = field(default_factory=Variants)


@dataclass(slots=True)
class _Switching:
    """A cost model that adds up the seconds of switches."""

    cost: Linear
    seconds_switching: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        self.seconds_switching += self.cost.swap * load.swapped
        return self.cost.seconds(load)


def serve(data: Data, case: Case) -> dict[str, float]:
    """Mean latency and time to first token in seconds, the largest latency, requests per second until all are done, and
    the time of switches relative to that of all else."""
    cost = _Switching(case.cost)
    served = _serve(data, case, cost)
    first = served.first_token - served.workload.arrival
    return {
        "jct": float(served.jct.mean()), "ttft": float(first.mean()), "max": float(served.jct.max()),
        "throughput": len(served.workload) / served.duration,
        "switching": cost.seconds_switching / (served.busy - cost.seconds_switching),
    }  # fmt: skip


def _serve(data: Data, case: Case, cost: _Switching) -> Served:
    work, sampled = requests(data, case)
    return simulate(policy(data, case), 1, work, cost, sampled, case.drafts)


def requests(data: Data, case: Case) -> tuple[Workload, Sampled]:
    """The requests and their acceptances, which are the same for all systems."""
    rng = np.random.default_rng([case.seed, case.count])
    times = arrivals.burst(case.count) if case.load is None else data.variants.arrivals(case.count, 1.0, rng)
    work = join(times, data.tables[case.data], 32, rng)
    if case.cap is not None:
        work = replace(work.cut(case.cap), predicted=np.minimum(work.predicted, case.cap))
    if case.sigma is not None or data.variants.predictor:
        work = work.predict(np.full(len(work), np.nan))  # the scheduler's predictor predicts
    sampled = Sampled(case.process, case.count, rng)
    if case.load is not None:
        work = replace(work, arrival=work.arrival * execution_times(case, work, sampled).mean() / case.load)
    return work, sampled


def execution_times(case: Case, work: Workload, sampled: Sampled) -> np.ndarray:
    """Seconds that each request takes by Eq. 6 with its true length and its long-run acceptance rate `[requests]`."""
    rates = np.array([sampled.share(i, case.drafts) or 0.0 for i in range(len(work))])
    round_ = case.cost.seconds(StepLoad(1 + case.drafts, drafting=1, levels=case.drafts))
    return work.output * round_ / (case.drafts * rates + 1)


def policy(data: Data, case: Case) -> PolicyConfig:
    """The system's policy with the case's settings."""
    preset, verify = data.systems[case.system], case.cost.seconds(StepLoad(1 + case.drafts))
    laps = {
        **preset.changes.get("laps_sd", {}),
        "draft_tokens": case.drafts, "draft_token_ms": 1e3 * case.cost.draft_level, "verify_ms": 1e3 * verify,
        **dict(case.laps),
    }  # fmt: skip
    las = {"quantum_ms": case.quantum_ms, **preset.changes.get("las", {})}
    predictor: dict[str, Any] = {"predictor": "none"}
    if case.sigma is not None:
        # The same errors for all systems: each draws them in the order of arrival.
        predictor = {"predictor": "noisy_oracle", "predictor_noise": case.sigma, "policy_seed": case.seed}
    return preset.but(laps_sd=laps, las=las).load(**predictor).policy


@dataclass(frozen=True, slots=True)
class Knee:
    """The search for the load at which the mean latency reaches `limit` mean execution times."""

    case: Case
    limit: float


def find_knee(data: Data, task: Knee) -> dict[str, float]:
    """The largest load, relative to the capacity, at which the mean latency is within the limit."""

    def latency(load: float) -> float:
        case = replace(task.case, load=load)
        work, sampled = requests(data, case)
        return serve(data, case)["jct"] / float(execution_times(case, work, sampled).mean())

    return {"load": knee(latency, task.limit, 0.5, tolerance=0.05)}


def cases(
    systems: Sequence[str], seeds: Sequence[int], data: str, blind: frozenset[str] = frozenset(), **settings: Any
) -> list[Case]:
    """A case for each system and seed. Systems in `blind` see no lengths, so all errors are the same to them."""
    return [
        Case(system, data, seed, **({**settings, "sigma": 0.0} if system in blind else settings))
        for system in systems for seed in seeds
    ]  # fmt: skip
