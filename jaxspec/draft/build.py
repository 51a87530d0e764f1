"""From settings to a speculator that is compiled, warmed up and profiled."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from jaxspec.config import EngineConfig
from jaxspec.draft.growth import Draws
from jaxspec.draft.runner import BEAMS, DEPTH, DraftRunner, draft_lattice
from jaxspec.draft.speculator import MOST_NODES, Drafter, ModelDrafter, NgramDrafter, Speculator
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights
from jaxspec.sched.trees import Chain, Drawing, EqualGreedy, Fixed, GlobalGreedy, TreePolicy
from jaxspec.step.executor import Executor
from jaxspec.step.lattice import Progress, compile_all
from jaxspec.step.rejection import Drawn


def build(
    config: EngineConfig,
    executor: Executor,
    model: tuple[DecoderConfig, Weights] | None,
    num_pages: int,
    progress: Progress,
    clock: Callable[[], float],
) -> Speculator:
    """`model`: the drafter's, from `drafters.load`; None for n-gram lookup."""
    drafter: Drafter = NgramDrafter()
    drawing = _drawing(config) if model is not None else None
    if model is not None:
        largest = executor.shapes[-1]
        shapes = draft_lattice(largest.tokens, largest.trees, largest.pages)
        runner = DraftRunner(
            config.draft[0], *model, executor, executor.layers, shapes, num_pages, config.page_size, config.dtype,
            BEAMS if drawing is None else [drawing],
        )  # fmt: skip
        compile_all(runner.jobs(), "compiling the drafter", progress)
        runner.warm_up()
        drafter = ModelDrafter(runner, clock)
    levels = config.draft_levels or DEPTH
    nodes = config.draft_nodes or min(2 * levels, MOST_NODES)
    policies: dict[str, TreePolicy | None] = {
        "auto": None,
        "chain": Chain(levels),
        "fixed": Fixed(),
        "equal_greedy": EqualGreedy(nodes),
        "global_greedy": GlobalGreedy(nodes),
    }
    policy = policies[config.tree] if drawing is None else Drawing(levels)
    speculator = Speculator(
        drafter, executor.profile(), policy, levels, 1 if config.tree == "chain" else None, config.tree == "auto"
    )
    executor.settled()
    return speculator


def _drawing(config: EngineConfig) -> Draws | None:
    """How drafts are drawn for rejection sampling, which fixes a tree's shape before; None without it."""
    if config.acceptance != "rejection":
        return None
    return Draws(Fixed().widths if config.tree == "fixed" else (1,) * DEPTH)


def room_for_draws(config: EngineConfig, model: tuple[DecoderConfig, Weights] | None) -> Drawn:
    """Where a drafter's distributions are kept until its drafts are verified; n-gram lookup has none, and its guesses
    are accepted by the same chance under both rules."""
    drawing = _drawing(config)
    if drawing is None or model is None:
        return Drawn.none()
    return Drawn.room(config.max_num_seqs, DEPTH, drawing.width, jnp.array(model[1]["vocab"], jnp.int32))
