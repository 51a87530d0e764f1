"""Builds tree policy, draft choice and speculator from the config. Does not import JAX: the simulator uses it too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.speculator import DEPTH, Speculator
from jaxspec.sched.spec.trees import AdaServe, Chain, EqualGreedy, Fixed, GlobalGreedy, TreePolicy
from jaxspec.sched.timing import StepTimes


def tree_policy(config: EngineConfig, step: StepTimes) -> TreePolicy | None:
    """The policy that `tree` names, None for `auto`: the speculator then maximises expected tokens per second."""
    adaserve = config.adaserve
    match config.tree:
        case "chain":
            return Chain(config.draft_depth or DEPTH)
        case "fixed":
            return Fixed()
        case "equal_greedy":
            return EqualGreedy(config.draft_nodes)
        case "global_greedy":
            return GlobalGreedy(config.draft_nodes)
        case "adaserve":
            return AdaServe(adaserve.max_nodes, step if adaserve.economic else None)
        case _:
            return None


def build_speculator(
    config: EngineConfig, drafters: Sequence[Drafter], step: StepTimes, policy: TreePolicy | None
) -> Speculator:
    """The speculator of these drafters under `policy`, with the config's draft choice, tree sizes and calibration.

    Raises `ConfigError` if `draft_limits` names a drafter that is not configured.
    """
    names = [d.name for d in drafters]
    if unknown := sorted({*config.draft_limits} - {*names}):
        raise ConfigError(f"draft_limits: no drafter {', '.join(unknown)} (configured: {', '.join(names)})")
    choice = None
    if config.draft_choice != "fastest":
        from jaxspec.sched.spec import draft_choice

        limits = [config.draft_limits.get(name, config.max_num_seqs) for name in names]
        sizes = [d.seconds(1, 1, 1, d.widths[0]) for d in drafters]
        rng = np.random.default_rng(config.policy_seed)
        choice = draft_choice.build(
            config.draft_choice, len(names), limits, sizes, rng, config.lbss, config.epsilon_greedy.epsilon
        )
    budget_policy = config.tree in ("equal_greedy", "global_greedy", "adaserve")
    by_budget = budget_policy and config.draft_nodes is None
    return Speculator(
        drafters, step, policy, config.draft_depth or DEPTH, 1 if config.tree == "chain" else None,
        config.tree == "auto" or (config.tree == "adaserve" and config.adaserve.economic),
        config.verify_budget if by_budget else None, by_budget, config.draft_calibration and budget_policy, choice,
    )  # fmt: skip
