"""The systems compared in SPIN's experiments, and their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.bench.papers.spin.costs import Costs
from jaxspec.bench.papers.spin.difficulty import SSMS, WINDOW, Requests
from jaxspec.bench.papers.spin.flow import Flowing
from jaxspec.bench.papers.spin.oracle import Oracle, Together
from jaxspec.draft.policies import build_speculator, tree_policy
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import step_times
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.tree_simulator import TreeSimulation

#: §VI-B1: requests that run at once. The token budget.
CONCURRENCY, PROMPTS = 8, 2048
#: §VI-B2 as written: the best drafter is drawn with probability 0.2 only.
AS_WRITTEN = {"epsilon": 0.8}


@dataclass(frozen=True, slots=True)
class System:
    """A system: a preset, draft models, and how verification runs.

    micro_batches: None: as many as the heuristic finds; flowing: micro-batches continue across steps (`flow`); knowing:
    an oracle draft choice, "each" (`Oracle`) or "together" (`Together`).
    """

    preset: Preset
    ssms: Sequence[str] = SSMS
    padded: bool = True
    micro_batches: int | None = 1
    flowing: bool = False
    knowing: str | None = None


def choosing(how: str, **changes: Any) -> Preset:
    """SPIN with another draft choice, and further changes."""
    return LBSS.but(draft_choice=how, **changes)


LBSS = Preset("spin")
NONE = System(choosing("single"), ssms=())
VANILLA: Mapping[str, System] = {name: System(choosing("single"), (name,)) for name in SSMS}
UNPACKED, UNPIPED, SPIN, OURS = "SPIN w/o bat. & pipe.", "SPIN w/o pipe.", "SPIN", "jaxspec"
#: Fig. 10. `jaxspec` uses `draft_choice: fastest`, and drafts only where that raises throughput.
SYSTEMS: Mapping[str, System] = {
    **VANILLA,
    UNPACKED: System(LBSS),
    UNPIPED: System(LBSS, padded=False),
    SPIN: System(LBSS, padded=False, micro_batches=None),
    OURS: System(choosing("fastest", tree="auto", draft_depth=None), padded=False, micro_batches=None),
}
#: Fig. 11: padded verification, no pipeline.
GREEDY, EPSILON, EPSILON_WRITTEN, FASTEST = "greedy", "ε-greedy", "ε-greedy as written", "fastest"
LEARNED, LEARNED_4, ORACLE, TOGETHER = "LBSS", "LBSS, B_j = 4", "oracle", "oracle, waiting counted"
CHOICES: Mapping[str, System] = {
    GREEDY: System(choosing("greedy")),
    EPSILON: System(choosing("epsilon_greedy")),
    EPSILON_WRITTEN: System(choosing("epsilon_greedy", epsilon_greedy=AS_WRITTEN)),
    FASTEST: System(choosing("fastest")),
    LEARNED: System(LBSS),
    LEARNED_4: System(LBSS.but(draft_limits=dict.fromkeys(SSMS, 4))),
    ORACLE: System(choosing("single"), knowing="each"),
    TOGETHER: System(choosing("single"), knowing="together"),
}


@dataclass(frozen=True, slots=True)
class _FixedRates:
    """Acceptance rates `[requests]` that were drawn beforehand."""

    fixed: np.ndarray

    def rates(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return self.fixed


def simulation(
    system: System, costs: Costs, llm: str, requests: Requests, seed: int, concurrency: int = CONCURRENCY
) -> TreeSimulation:
    """A simulation of the system. The same seed gives every system the same drafts and texts."""
    config = system.preset.load(tree="chain", draft_depth=WINDOW, prefill="first", policy_seed=seed)
    work, cost = requests.work, costs.targets[llm]
    longest = int((work.input + work.output).max())
    times = step_times(cost, PROMPTS)
    limits = SchedulerConfig(concurrency, PROMPTS, longest, None, PROMPTS, config.policy, times=times)
    pool = PagePool(concurrency * -(-longest // PAGE_SIZE), PAGE_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(limits, pool)
    if not system.ssms:
        return TreeSimulation(scheduler, work, cost, padded=system.padded)
    widths = (1, 2, 4) if config.tree == "auto" else (1,)
    drafters = [
        SimulatedDrafter(
            TreeProcess(_FixedRates(requests.rates[:, SSMS.index(name)])), work.output.tolist(), costs.drafts[name],
            np.random.default_rng([seed, SSMS.index(name)]), widths, name, own_device=True,
        )
        for name in system.ssms
    ]  # fmt: skip
    speculator = build_speculator(config, drafters, times)
    rounds = [d.seconds(concurrency, 2 * concurrency, WINDOW, 1) for d in drafters]
    step = lambda: times.of(concurrency * (1 + WINDOW))  # noqa: E731
    if system.knowing == "each":
        speculator.choice = Oracle(requests.rates, rounds, step, [concurrency] * len(drafters))
    elif system.knowing == "together":
        speculator.choice = Together(requests.rates, rounds, step)
    kind = Flowing if system.flowing else TreeSimulation
    return kind(scheduler, work, cost, speculator, drafters, system.micro_batches, system.padded)


def goodput(served: Served) -> dict[str, float]:
    """Accepted draft tokens (SPIN's goodput, §IV-A) and all tokens, per second, while requests waited for a slot.

    Requests still running at the end of that time count with the share of their run time within it.
    """
    end = float(served.first_scheduled.max())
    share = np.clip((end - served.first_scheduled) / (served.finished - served.first_scheduled), 0, 1)
    return {
        "accepted": float((served.accepted * share).sum()) / end,
        "tokens": float((served.workload.output * share).sum()) / end,
    }
