"""What stands in for what a simulated request lacks: text, a priority, a latency target, a draft model. Each is said in
a line, so that no table passes for a policy that was not simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.config import EngineConfig
from jaxspec.draft.policies import arrange, tree_policy
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.draft_cost import FREE, draft_cost
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import Slo
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.timing import StepTimes

#: Predictors that read the text of a prompt; `auto` is `proxy` wherever one is there.
READS_TEXT = ("auto", "proxy", "retrieval")
#: Orders that go by the expected length of an answer.
BY_LENGTH = ("sjf", "laps_sd", "alise")
NGRAM, AUTO, TRAINED = "ngram", "auto", "trained"
#: Output tokens of all requests that drafts are drawn for beforehand: some 50 bytes each.
MOST_DRAFTED = 20_000_000


@dataclass(frozen=True, slots=True)
class StandIns:
    """The settings as simulated, the targets of requests that name none, and a line for each difference."""

    config: EngineConfig
    slo: Slo
    notes: list[str] = field(default_factory=list)


def stand_in(config: EngineConfig, workload: Workload, host_pages: int, drafting: bool) -> StandIns:
    """`drafting`: whether anything is drafted for the requests."""
    notes: list[str] = []
    unpredicted = bool(np.isnan(workload.predicted).any())
    if config.predictor in READS_TEXT and unpredicted:
        notes.append(
            f"predictor: {config.predictor} reads prompts, and simulated requests have no text: noisy_oracle stands in "
            f"(the true length, off by a log-normal error of σ {config.predictor_noise:g}; --set predictor_noise=S, "
            "--set predictor=oracle or none, or --predictions COLUMN of --lengths)"
        )
        config = config.model_copy(update={"predictor": "noisy_oracle"})
    elif config.predictor == "none" and config.order in BY_LENGTH and unpredicted:
        notes.append(
            f"predictor: none, so order: {config.order} goes by what requests ask for, which here is what they write: "
            "this is an oracle (--set predictor=noisy_oracle has errors)"
        )
    if config.order == "priority":
        notes.append("order: priority: simulated requests have none of their own: this is first come, first served")
    slo = config.slo.slo
    heeds = config.pace != "none" or (drafting and config.tree == "adaserve")
    if heeds and not slo and workload.tpot is None:
        what = f"pace: {config.pace}" if config.pace != "none" else "tree: adaserve"
        notes.append(f"{what}: no request has a latency target to heed (--set slo.tpot_ms=MS gives all of them one)")
    if config.slo.admission == "strict":
        notes.append("slo.admission: strict: no request is refused here")
    if config.memory == "swap" and not host_pages:
        notes.append("memory: swap: there is no host memory to swap to, KV is recomputed instead (--host-pages N)")
    return StandIns(config, slo, notes)


def drafters_of(
    config: EngineConfig, workload: Workload, process: Process, cost: Cost, rng: np.random.Generator
) -> tuple[list[SimulatedDrafter], str]:
    """A simulated drafter for each that the settings name, and a line that says what is assumed of them.

    Raises `BenchError` for more output tokens than drafts are drawn for.
    """
    if (tokens := int(workload.output.sum())) > MOST_DRAFTED:
        raise BenchError(
            f"draft: {tokens:,} output tokens are more than the {MOST_DRAFTED:,} that drafts are drawn for: simulate "
            "fewer requests, a chain (--draft-length N) or no drafts (--draft-length 0)"
        )
    model = draft_cost(cost)
    drafters = []
    for name, seed in zip(names := _names(config.draft), rng.spawn(len(names)), strict=True):
        free = name == NGRAM
        drafters.append(
            SimulatedDrafter(
                TreeProcess(process), workload.output.tolist(), FREE if free else model, seed,
                (1,) if free else (1, 2, 4), name, bool(config.draft_devices.get(name)),
            )
        )  # fmt: skip
    took = f"a run of a draft model takes {1e3 * model.seconds(1, 1, 1, 1):.2f} ms"
    if model == FREE:
        took = "drafting takes no time, as this cost model knows none"
    elif names == [NGRAM]:
        took = "ngram takes no time"
    note = (
        f"draft: {', '.join(names)} simulated: each guesses a token right with the chance {process.mean:g}, whatever "
        f"the text (--acceptance), and {took}; --draft-length 0 for no drafts"
    )
    return drafters, note


def speculator_of(config: EngineConfig, drafters: Sequence[SimulatedDrafter], times: StepTimes) -> Speculator:
    """What decides on drafts, as the settings say. Raises `ConfigError`."""
    return arrange(config, drafters, times, tree_policy(config, times))


def _names(draft: Sequence[str]) -> list[str]:
    """`auto` is n-gram lookup and the model's trained drafter."""
    named = [n for name in draft for n in ((NGRAM, TRAINED) if name == AUTO else (name,))]
    return list(dict.fromkeys(named))
