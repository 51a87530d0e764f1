"""The systems compared in SPIN's experiments, and their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.serving import PAGE_SIZE
from jaxspec.bench.papers.spin.difficulty import SSMS, WINDOW, Requests
from jaxspec.bench.papers.spin.flow import Flowing
from jaxspec.bench.papers.spin.oracle import Oracle, Together
from jaxspec.bench.papers.spin.times import Costs
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import step_times
from jaxspec.sched.sim.drafter import SimulatedDrafter, TreeProcess
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.spec.draft_choice.choice import DraftChoice

# --- systems ----------------------------------------------------------------------------------------------------------

#: §VI-B1: requests that run at once. The token budget.
CONCURRENCY, PROMPTS = 8, 2048
#: §VI-B2 as written: all requests get the best drafter with probability 0.2 only, and random ones otherwise.
AS_WRITTEN = {"epsilon": 0.8}


@dataclass(frozen=True, slots=True)
class System:
    """A system: a preset, draft models, and how verification runs.

    micro_batches: None: as many as the heuristic finds; flowing: micro-batches continue across steps (`Flow`); knowing:
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
UNPACKED, UNPIPED, SPIN = "SPIN w/o bat. & pipe.", "SPIN w/o pipe.", "SPIN"
WAITING, OURS = "SPIN, pipeline as in the engine", "jaxspec"
#: Fig. 10. SPIN's two micro-batches flow from step to step; in the engine all end with their step, and the heuristic
#: finds their number. `jaxspec` uses `draft_choice: fastest`, and drafts only where that raises throughput.
SYSTEMS: Mapping[str, System] = {
    **VANILLA,
    UNPACKED: System(LBSS),
    UNPIPED: System(LBSS, padded=False),
    SPIN: System(LBSS, padded=False, micro_batches=2, flowing=True),
    WAITING: System(LBSS, padded=False, micro_batches=None),
    OURS: System(choosing("fastest", tree="auto", draft_depth=None), padded=False, micro_batches=None),
}
#: Fig. 11: padded verification, no pipeline. The prior of `lbss` is this engine's; without it, it is SPIN's algorithm.
GREEDY, EPSILON, EPSILON_WRITTEN, FASTEST = "greedy", "ε-greedy, 20 % random", "ε-greedy, 80 % random", "fastest"
LEARNED, LEARNED_4, ALGORITHM_1 = "LBSS", "LBSS, B_j = 4", "LBSS, no prior"
ORACLE, TOGETHER = "oracle", "oracle, waiting counted"
CHOICES: Mapping[str, System] = {
    GREEDY: System(choosing("greedy")),
    EPSILON: System(choosing("epsilon_greedy")),
    EPSILON_WRITTEN: System(choosing("epsilon_greedy", epsilon_greedy=AS_WRITTEN)),
    FASTEST: System(choosing("fastest")),
    LEARNED: System(LBSS),
    LEARNED_4: System(LBSS.but(draft_limits=dict.fromkeys(SSMS, 4))),
    ALGORITHM_1: System(LBSS.but(lbss={"prior": False})),
    ORACLE: System(choosing("single"), knowing="each"),
    TOGETHER: System(choosing("single"), knowing="together"),
}
#: Fig. 13: micro-batches; None: as many as the heuristic finds.
PARTS = (1, 2, 3, 4, 5, 7, 9, None)
STEPS, FLOWING = "ending with their step", "flowing"
PIPELINES: Mapping[str, System] = {
    f"{parts}, {kind}": replace(SYSTEMS[SPIN], micro_batches=parts, flowing=kind == FLOWING)
    for kind in (STEPS, FLOWING) for parts in PARTS
}  # fmt: skip
#: Fig. 4 and 12: padded, packed.
WAYS = PADDED, PACKED = "padded", "packed"
VERIFIED: Mapping[str, System] = {
    f"{name}, {way}": replace(own, padded=way == PADDED)
    for name, own in {"none": NONE, "68M": VANILLA["68M"], "1.1B": VANILLA["1.1B"]}.items() for way in WAYS
}  # fmt: skip
#: Settings of LBSS to compare; the engine's defaults are α = β = 2 and a strong prior.
LBSS_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "α 2, β 2": {"exploration": 2, "chunk": 2},
    "α 2, β 2, from epoch 1": {"exploration": 2, "chunk": 2, "prior_epoch": 1},
    "α 2, β 2, no prior": {"exploration": 2, "chunk": 2, "prior": False},
    "α 6, β 2": {"exploration": 6, "chunk": 2},
    "α 6, β 2, no prior": {"exploration": 6, "chunk": 2, "prior": False},
    "α 1, β 1": {"exploration": 1, "chunk": 1},
    "α 1, β 1, 1 prior slot": {"exploration": 1, "chunk": 1, "prior_slots": 1.0},
}
SET: Mapping[str, System] = {name: System(LBSS.but(lbss=own)) for name, own in LBSS_SETTINGS.items()}
#: The experiment's assumptions without a variation.
AS_FITTED = "as fitted"
#: All systems by name.
ALL: Mapping[str, System] = {**SYSTEMS, **CHOICES, **PIPELINES, **VERIFIED, **SET}


# --- the simulation ---------------------------------------------------------------------------------------------------


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
    rounds = [d.seconds(concurrency, 2 * concurrency, WINDOW, 1) for d in drafters]
    step = lambda: times.of(concurrency * (1 + WINDOW))  # noqa: E731
    choice: DraftChoice | None = None
    if system.knowing == "each":
        choice = Oracle(requests.rates, rounds, step, [concurrency] * len(drafters))
    elif system.knowing == "together":
        choice = Together(requests.rates, rounds, step)
    speculator = build_speculator(config, drafters, times, choice=choice)
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
