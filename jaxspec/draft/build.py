"""From settings to a speculator that is compiled, warmed up and profiled."""

from __future__ import annotations

from collections.abc import Callable

from jaxspec.config import EngineConfig
from jaxspec.draft.runner import DEPTH, DraftRunner, draft_lattice
from jaxspec.draft.speculator import MOST_NODES, Drafter, ModelDrafter, NgramDrafter, Speculator
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.weights import Weights
from jaxspec.sched.trees import Chain, EqualGreedy, Fixed, GlobalGreedy, TreePolicy
from jaxspec.step.executor import Executor
from jaxspec.step.lattice import Progress, compile_all


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
    if model is not None:
        largest = executor.shapes[-1]
        shapes = draft_lattice(largest.tokens, largest.trees, largest.pages)
        runner = DraftRunner(
            config.draft[0], *model, executor.layers, shapes, num_pages, config.page_size, config.dtype
        )  # fmt: skip
        compile_all(runner.jobs(executor.features), "compiling the drafter", progress)
        runner.warm_up(executor.features)
        drafter = ModelDrafter(runner, lambda: executor.features, clock)
    levels = config.draft_levels or DEPTH
    nodes = config.draft_nodes or min(2 * levels, MOST_NODES)
    policies: dict[str, TreePolicy | None] = {
        "auto": None,
        "chain": Chain(levels),
        "fixed": Fixed(),
        "equal_greedy": EqualGreedy(nodes),
        "global_greedy": GlobalGreedy(nodes),
    }
    speculator = Speculator(
        drafter, executor.profile(), policies[config.tree], levels, 1 if config.tree == "chain" else None
    )
    executor.settled()
    return speculator
