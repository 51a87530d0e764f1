"""Builds the speculator from the config. Does not import JAX: the simulator uses it too."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.sched.slots import DRAFT_CHOICES, TREES, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice
from jaxspec.sched.spec.drafter import Drafter
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.sched.spec.trees.sampled import SampledTree
from jaxspec.sched.timing import StepTimes


def build_speculator(
    config: EngineConfig,
    drafters: Sequence[Drafter],
    step: StepTimes,
    *,
    sampled: bool = False,
    choice: DraftChoice | None = None,
) -> Speculator:
    """The speculator of these drafters under the config's tree policy and draft choice (or `choice`).

    `sampled`: drafts are random draws in a fixed shape, for rejection sampling. Raises `ConfigError` if `draft_limits`
    names a drafter that is not configured, or if a policy refuses its settings.
    """
    names = [d.name for d in drafters]
    if unknown := sorted({*config.draft_limits} - {*names}):
        raise ConfigError(f"draft_limits: no drafter {', '.join(unknown)} (configured: {', '.join(names)})")
    context = SlotContext(config.policy, config.max_num_seqs, times=step, drafters=drafters)
    try:
        tree = TREES.build(context)
        if sampled:
            tree = SampledTree(config.draft_depth or DEPTH, tree.adaptive)
        if choice is None and drafters and DRAFT_CHOICES.selected(config).assigns:
            choice = DRAFT_CHOICES.build(context)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    speculator = Speculator(drafters, step, tree, config.draft_depth, config.verify_budget, choice)
    speculator.host.overlapping = bool(config.async_scheduling)
    return speculator
