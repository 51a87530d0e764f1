"""The systems compared in AdaServe's experiments, their simulation, and their requests (§6.1): three categories, each
with its TPOT SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.cost import Machine, step_times
from jaxspec.sched.sim.draft_cost import LLAMA_160M_A100
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Lengths, Workload, join
from jaxspec.sched.slots import TREES

OURS, PAPER, UNCALIBRATED = "jaxspec", "AdaServe", "AdaServe, uncalibrated"
INCREMENTAL, SARATHI, SPECINFER = "IncrDec", "Sarathi", "SpecInfer"
EQUAL, GLOBAL, FCFS, STTA = "EqualGreedy", "GlobalGreedy", "FCFS", "STTA"

#: AdaServe as in the paper: without what the preset adds.
_AS_WRITTEN = Preset("adaserve").but(adaserve={"economic": False}, pace="none")
#: IncrDec also stands for vLLM: as the paper says, both put prefill before decoding. All have the same drafter.
SYSTEMS: Mapping[str, Preset] = {
    INCREMENTAL: Preset("incremental"),
    SARATHI: Preset("sarathi"),
    FCFS: Preset("slo_fcfs"),
    STTA: Preset("stta"),
    SPECINFER: Preset("specinfer").but(draft=["auto"]),
    EQUAL: Preset("equal_greedy"),
    GLOBAL: Preset("global_greedy"),
    UNCALIBRATED: _AS_WRITTEN.but(draft_calibration=False),
    PAPER: _AS_WRITTEN,
    OURS: Preset("adaserve"),
}
#: Baselines of the paper's end-to-end comparison (Fig. 4 and 5), without drafts and with them.
BASELINES = INCREMENTAL, SARATHI, SPECINFER

#: The drafter: its first candidate is accepted with probability 0.66. SpecInfer (Miao et al. 2024), Table 2: with
#: chains of 8 from LLaMA-68M, LLaMA-7B has a mean accepted length of 2.73 on chat prompts, that is 0.64; the drafter
#: here is larger, so a little more. With the process's other constants the first four candidates together have 86 %.
#: That, the variation between requests and positions, and the calibration are assumptions.
DRAFTS = TreeProcess(Process(0.66, 0.1))
#: `max_num_seqs` and `max_model_len`.
CONCURRENCY, CONTEXT = 256, 4096
#: Token budgets: of steps that also decode, Sarathi-Serve's value for strict SLOs; of prefill-only steps, the engine's
#: default.
CHUNK, PROMPTS = 512, 2048


def simulation(
    system: Preset, machine: Machine, work: Workload, seed: int, process: TreeProcess = DRAFTS
) -> TreeSimulation:
    """A simulation of the system. The same seed gives every system the same drafts and texts."""
    config = system.load()
    budget = PROMPTS if config.prefill == "first" else CHUNK
    config = config.model_copy(update={"max_num_batched_tokens": budget})
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
    scheduler = Scheduler(limits, PagePool(machine.positions // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False))
    if not config.draft:
        return TreeSimulation(scheduler, work, machine.cost)
    drafter = SimulatedDrafter(
        process, work.output.tolist(), LLAMA_160M_A100, np.random.default_rng([seed, 160]),
        expansion=TREES.selected(config).expansion,
    )  # fmt: skip
    return TreeSimulation(scheduler, work, machine.cost, build_speculator(config, [drafter], times), [drafter])


# --- requests ---------------------------------------------------------------------------------------------------------

NAMES = ("strict", "moderate", "relaxed")
#: Shares of the categories in Fig. 4 and 5.
MIX = (0.6, 0.2, 0.2)
#: Table 2: TPOT SLOs in seconds of moderate and relaxed requests. That of strict ones depends on the baseline latency.
TARGETS: Mapping[str, tuple[float, float]] = {
    "llama-2-7b": (0.03, 0.1), "llama-2-13b": (0.03, 0.1), "llama-2-70b": (0.06, 0.1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Categories:
    """Each category's table of lengths and its TPOT SLO in seconds."""

    lengths: tuple[Lengths, Lengths, Lengths]
    targets: tuple[float, float, float]

    def workload(
        self, arrivals: Sequence[Arrival], shares: Sequence[float], rng: np.random.Generator
    ) -> tuple[Workload, np.ndarray]:
        """One request per arrival, with its category drawn by `shares`. Returns the categories `[requests]` too."""
        kind = rng.choice(3, size=len(arrivals), p=shares)
        by_kind = [join(arrivals, table, 32, rng) for table in self.lengths]
        pick = lambda name: np.choose(kind, [getattr(one, name) for one in by_kind])  # noqa: E731
        tpot = np.asarray(self.targets)[kind]
        return replace(by_kind[0], input=pick("input"), output=pick("output"), tpot=tpot), kind


def capped(table: Lengths, context: int) -> Lengths:
    """Lengths cut to the context: the output to at most half of it, the prompt to the rest."""
    output = np.minimum(table.output, context // 2)
    return Lengths(np.clip(table.input, 1, context - output), output, table.predicted)


def strict_share(share: float) -> tuple[float, float, float]:
    """Shares of the categories for a share of strict requests (Fig. 6); the other two get half of the rest each."""
    return share, (1 - share) / 2, (1 - share) / 2
