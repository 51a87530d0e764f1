"""The systems compared in AdaServe's experiments, and their simulation (§6.1, §6.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxspec.bench.papers.adaserve.requests import CONTEXT
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.cost import Machine, step_times
from jaxspec.sched.sim.draft_cost import LLAMA_160M_A100
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slots import TREES

OURS, PAPER = "jaxspec", "AdaServe"
INCREMENTAL, SARATHI, SPECINFER = "IncrDec", "Sarathi", "SpecInfer"
EQUAL, GLOBAL, FCFS, STTA, SEPARATE = "EqualGreedy", "GlobalGreedy", "FCFS", "STTA", "SepPipe"
#: Variations of the systems.
UNCALIBRATED, OUTSIDE = "AdaServe, uncalibrated", "AdaServe, prefill not counted in B"
BLIND, KNOWN, UNPACED = "jaxspec, lengths unknown", "jaxspec, lengths known", "jaxspec, without a pace"

#: Log-normal error of the length predictions that `pace: deadline` works with: SSJF's predictor (61.5 % accuracy for
#: five classes) has 0.49 (its page).
PREDICTION_ERROR = 0.49

#: AdaServe as in the paper: without what the preset adds.
_AS_WRITTEN = Preset("adaserve").but(adaserve={"economic": False}, pace="none")
_OURS = Preset("adaserve").but(predictor="noisy_oracle", predictor_noise=PREDICTION_ERROR)
#: IncrDec also stands for vLLM: as the paper says, both put prefill before decoding. All have the same drafter.
SYSTEMS: Mapping[str, Preset] = {
    INCREMENTAL: Preset("incremental"),
    SARATHI: Preset("sarathi"),
    SPECINFER: Preset("specinfer").but(draft=["auto"]),
    FCFS: Preset("slo_fcfs"),
    STTA: Preset("stta"),
    SEPARATE: Preset("sarathi"),
    EQUAL: Preset("equal_greedy"),
    GLOBAL: Preset("global_greedy"),
    PAPER: _AS_WRITTEN,
    UNCALIBRATED: _AS_WRITTEN.but(draft_calibration=False),
    OUTSIDE: _AS_WRITTEN.but(prompts_in_budget=False),
    OURS: _OURS,
    BLIND: Preset("adaserve"),
    KNOWN: _OURS.but(predictor="oracle", predictor_noise=0.0),
    UNPACED: Preset("adaserve").but(pace="none"),
}
#: Baselines of the paper's end-to-end comparison (Fig. 4 and 5), without drafts and with them.
BASELINES = INCREMENTAL, SARATHI, SPECINFER
#: SLO-aware continuous batching (Fig. 7), and other trees (Fig. 8).
STRATEGIES, TREE_POLICIES = (FCFS, STTA, SEPARATE), (EQUAL, GLOBAL)

#: Chance that the drafter's first candidate is accepted, mean and standard deviation over requests: fitted to Fig. 10,
#: the paper's only figure that shows it (the page has the table). FORMER: what a drafter of 68 million parameters has
#: on chat prompts by SpecInfer's Table 2, a little more for 160 million.
FITTED, FORMER = (0.42, 0.15), (0.66, 0.1)
#: `max_num_seqs`.
CONCURRENCY = 256
#: Token budgets: of steps that also decode, Sarathi-Serve's value for strict SLOs; of prefill-only steps, the engine's
#: default.
CHUNK, PROMPTS = 512, 2048


def drafts(first: tuple[float, float]) -> TreeProcess:
    """The drafter whose first candidate has this chance. The other constants are the process's, by assumption."""
    return TreeProcess(Process(*first))


def simulation(
    system: Preset, machine: Machine, work: Workload, seed: int, first: tuple[float, float] = FITTED
) -> TreeSimulation:
    """A simulation of the system. The same seed gives every system the same drafts and texts."""
    config = system.load()
    budget = PROMPTS if config.prefill == "first" else CHUNK
    times = step_times(machine.cost, CONTEXT)
    limits = SchedulerConfig(CONCURRENCY, budget, CONTEXT, None, budget, config.policy, times=times)
    scheduler = Scheduler(limits, PagePool(machine.positions // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False))
    if not config.draft:
        return TreeSimulation(scheduler, work, machine.cost)
    drafter = SimulatedDrafter(
        drafts(first), work.output.tolist(), LLAMA_160M_A100, np.random.default_rng([seed, 160]),
        expansion=TREES.selected(config).expansion,
    )  # fmt: skip
    return TreeSimulation(scheduler, work, machine.cost, build_speculator(config, [drafter], times), [drafter])
