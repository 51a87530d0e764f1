"""Replacements for what simulated requests lack: text, priorities, SLOs, draft models.

Each replacement is reported in a note, so that results are not mistaken for those of the preset's own policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.config import EngineConfig
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.draft_cost import FREE, draft_cost
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import MEMORIES, ORDERS, PACES, PREDICTORS, TREES, Need

LOOKUPS, GRAMMAR, AUTO, TRAINED = ("suffix", "ngram"), "grammar", "auto", "trained"
#: Maximum output tokens of all requests with simulated drafters, which need about 50 bytes per token.
MAX_DRAFTED = 20_000_000


@dataclass(frozen=True, slots=True)
class StandIns:
    """The config as simulated, the SLO of requests without their own, and a note for each replacement."""

    config: EngineConfig
    slo: Slo
    notes: list[str] = field(default_factory=list)


def stand_in(config: EngineConfig, workload: Workload, host_pages: int, drafting: bool) -> StandIns:
    """The replacements that `config` needs. `drafting`: whether drafting is simulated."""
    notes: list[str] = []
    order, pace, tree = ORDERS.selected(config), PACES.selected(config), TREES.selected(config)
    unpredicted = bool(np.isnan(workload.predicted).any())
    if PREDICTORS.selected(config).reader and unpredicted:
        notes.append(
            f"predictor: {config.predictor} reads prompts, but simulated requests have no text; replaced by "
            f"noisy_oracle, the true length with a log-normal error of σ {config.predictor_noise:g} (change with --set "
            "predictor_noise=S, --set predictor=oracle or none, or --predictions COLUMN)"
        )
        config = config.model_copy(update={"predictor": "noisy_oracle"})
    elif config.predictor == "none" and Need.LENGTHS in order.needs and unpredicted:
        notes.append(
            f"predictor: none, so order: {config.order} knows only max_tokens, which says nothing of the output length "
            "of simulated requests (for predictions: --set predictor=noisy_oracle or oracle)"
        )
    if Need.PRIORITIES in order.needs:
        notes.append(f"order: {config.order}: all simulated requests have the same priority: first come, first served")
    slo = config.slo.slo
    by_slo = [f"pace: {config.pace}"] if Need.SLOS in pace.needs else []
    by_slo += [f"tree: {config.tree}"] if drafting and Need.SLOS in tree.needs else []
    if by_slo and not slo and workload.tpot is None:
        notes.append(f"{by_slo[0]}: no request has a latency target (--set slo.tpot_ms=MS sets one for all requests)")
    if config.slo.admission == "strict":
        notes.append("slo.admission: strict: not simulated, no request is refused")
    if Need.HOST_MEMORY in MEMORIES.selected(config).needs and not host_pages:
        notes.append(
            f"memory: {config.memory}: no host memory to swap to, so KV is recomputed (--host-pages N adds host memory)"
        )
    return StandIns(config, slo, notes)


def drafters_of(
    config: EngineConfig, workload: Workload, process: Process, cost: Cost, rng: np.random.Generator
) -> tuple[list[SimulatedDrafter], str]:
    """A simulated drafter for each drafter of the config, and a note on what is assumed of them.

    Raises `BenchError` if the requests have more than `MAX_DRAFTED` output tokens.
    """
    if (tokens := int(workload.output.sum())) > MAX_DRAFTED:
        raise BenchError(
            f"draft: the requests have {tokens:,} output tokens, drafters can be simulated for {MAX_DRAFTED:,}: use "
            "fewer requests, draft a chain (--draft-length N) or do not draft (--draft-length 0)"
        )
    model, expansion = draft_cost(cost), TREES.selected(config).expansion
    drafters = []
    for name, seed in zip(names := _names(config.draft), rng.spawn(len(names)), strict=True):
        free = name in LOOKUPS
        drafters.append(
            SimulatedDrafter(
                TreeProcess(process), workload.output.tolist(), FREE if free else model, seed,
                (1,) if free else (1, 2, 4), name, bool(config.draft_devices.get(name)), () if free else expansion,
            )
        )  # fmt: skip
    duration = f"one forward pass of a draft model takes {1e3 * model.seconds(1, 1, 1, 1):.2f} ms"
    if model == FREE:
        duration = "drafting takes no time, because the cost model has no draft times"
    elif len(names) == 1 and names[0] in LOOKUPS:
        duration = f"{names[0]} takes no time"
    note = (
        f"draft: {', '.join(names)} simulated: a draft token is right with probability {process.mean:g} independent of "
        f"the text (--acceptance), and {duration}; --draft-length 0: no drafting"
    )
    return drafters, note


def _names(draft: Sequence[str]) -> list[str]:
    """Names of the drafters, with `auto` replaced by suffix drafting and the model's trained drafter. Without grammar
    drafting: simulated requests have no structured output."""
    names = [n for name in draft for n in ((LOOKUPS[0], TRAINED) if name == AUTO else (name,)) if n != GRAMMAR]
    return list(dict.fromkeys(names))
