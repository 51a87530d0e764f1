"""Builds the speculator from the config. Does not import JAX: the simulator uses it too."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.sched.slots import DRAFT_CHOICES, TREES, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.policy import TreePolicy
from jaxspec.sched.timing import StepTimes


def build_speculator(
    config: EngineConfig,
    drafters: Sequence[Drafter],
    step: StepTimes,
    policy: TreePolicy | None = None,
    choice: DraftChoice | None = None,
) -> Speculator:
    """The speculator of these drafters, with the config's tree policy and draft choice unless they are given.

    Raises `ConfigError` if `draft_limits` names a drafter that is not configured.
    """
    names = [d.name for d in drafters]
    if unknown := sorted({*config.draft_limits} - {*names}):
        raise ConfigError(f"draft_limits: no drafter {', '.join(unknown)} (configured: {', '.join(names)})")
    context = SlotContext(config.policy, config.max_num_seqs, times=step, drafters=drafters)
    policy = policy or TREES.build(context)
    if choice is None and drafters and DRAFT_CHOICES.selected(context.policy).assigns:
        choice = DRAFT_CHOICES.build(context)
    return Speculator(drafters, step, policy, config.draft_depth, config.verify_budget, choice)
