"""From settings to the choice of what is drafted and verified; without JAX, so that the simulator makes the same."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.config import EngineConfig
from jaxspec.sched.drafter import Drafter
from jaxspec.sched.speculator import DEPTH, Speculator
from jaxspec.sched.steptimes import StepTimes
from jaxspec.sched.trees import AdaServe, Chain, EqualGreedy, Fixed, GlobalGreedy, TreePolicy


def tree_policy(config: EngineConfig, step: StepTimes) -> TreePolicy | None:
    """The policy that `tree` names; None: what raises the expected tokens per second."""
    adaserve = config.adaserve
    match config.tree:
        case "chain":
            return Chain(config.draft_levels or DEPTH)
        case "fixed":
            return Fixed()
        case "equal_greedy":
            return EqualGreedy(config.draft_nodes)
        case "global_greedy":
            return GlobalGreedy(config.draft_nodes)
        case "adaserve":
            return AdaServe(adaserve.most_nodes, step if adaserve.economic else None)
        case _:
            return None


def arrange(
    config: EngineConfig, drafters: Sequence[Drafter], step: StepTimes, policy: TreePolicy | None
) -> Speculator:
    """These drafters at work under `policy`, shaped and calibrated as the settings say."""
    budgeted = config.tree in ("equal_greedy", "global_greedy", "adaserve")
    shaped = budgeted and config.draft_nodes is None
    return Speculator(
        drafters, step, policy, config.draft_levels or DEPTH, 1 if config.tree == "chain" else None,
        config.tree == "auto" or (config.tree == "adaserve" and config.adaserve.economic),
        (config.draft_budget or step.budget) if shaped else None, config.draft_calibration and budgeted,
    )  # fmt: skip
