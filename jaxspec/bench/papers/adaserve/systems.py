"""What AdaServe's experiments compare, and serving a workload with one of them in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.config import EngineConfig
from jaxspec.draft.policies import arrange, tree_policy
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.cost import Machine, step_times
from jaxspec.sched.sim.draft_cost import LLAMA_160M_A100
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Workload

OURS, PAPER, UNCALIBRATED = "jaxspec", "AdaServe", "AdaServe, uncalibrated"
INCREMENTAL, SARATHI, SPECINFER = "IncrDec", "Sarathi", "SpecInfer"
EQUAL, GLOBAL, FCFS, STTA = "EqualGreedy", "GlobalGreedy", "FCFS", "STTA"

#: Settings as in the presets of `configs/`, but for what steps hold. IncrDec stands for vLLM too: as the paper says, it
#: puts prompts before the decoding of others as vLLM does.
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    INCREMENTAL: {"draft": [], "prefill": "first"},
    SARATHI: {"draft": []},
    FCFS: {"draft": [], "pace": "fcfs"},
    STTA: {"draft": [], "pace": "stta"},
    SPECINFER: {"tree": "fixed"},
    EQUAL: {"tree": "equal_greedy"},
    GLOBAL: {"tree": "global_greedy"},
    UNCALIBRATED: {"tree": "adaserve", "adaserve": {"economic": False}, "draft_calibration": False},
    PAPER: {"tree": "adaserve", "adaserve": {"economic": False}},
    OURS: {"tree": "adaserve", "pace": "deadline"},
}
#: Those that the paper compares end to end (Fig. 4 and 5) without drafts or with any.
BASELINES = INCREMENTAL, SARATHI, SPECINFER

#: The chance that the drafter's first choice is right. SpecInfer (Miao et al. 2024), Table 2: chains of 8 of LLaMA-68M
#: give LLaMA-7B 2.73 tokens a verification on chat prompts, that is 0.64; the drafter here is larger, so a little more.
#: With the process's other constants the first four choices hold 86 %. That, how requests and places differ, and how
#: sure the drafter is, are assumed.
DRAFTS = TreeProcess(Process(0.66, 0.1))
#: Requests that run at once, at most, and positions of the model.
CONCURRENCY, CONTEXT = 256, 4096
#: Tokens of a step: of one that decodes as well, Sarathi-Serve's for strict targets; of one that only computes prompts,
#: as many as the engine allows.
CHUNK, PROMPTS = 512, 2048


def simulation(
    settings: Mapping[str, Any], machine: Machine, work: Workload, seed: int, process: TreeProcess = DRAFTS
) -> TreeSimulation:
    """Ready to run. The same seed gives every system the same drafts and the same truth."""
    first = settings.get("prefill") == "first"
    config = EngineConfig.load(None, **{"max_num_batched_tokens": PROMPTS if first else CHUNK, **settings})
    times = step_times(machine.cost, CONTEXT)
    limits = SchedulerConfig(
        CONCURRENCY,
        config.max_num_batched_tokens,
        CONTEXT,
        None,
        config.max_num_batched_tokens,
        config.policy,
        times=times,
    )
    scheduler = Scheduler(limits, PagePool(machine.positions() // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False))
    if not config.draft:
        return TreeSimulation(scheduler, work, machine.cost)
    drafter = SimulatedDrafter(process, work.output.tolist(), LLAMA_160M_A100, np.random.default_rng([seed, 160]))
    return TreeSimulation(
        scheduler, work, machine.cost, arrange(config, [drafter], times, tree_policy(config, times)), [drafter]
    )
