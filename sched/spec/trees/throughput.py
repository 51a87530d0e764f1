"""Throughput: as many nodes as raise the expected tokens per second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.slots import TREES, Need, SlotContext
from jaxspec.sched.spec.trees.policy import DEPTH, StepCandidates, TreePolicy
from jaxspec.sched.timing import StepTimes


@TREES.register("auto")
@dataclass(frozen=True, slots=True)
class Throughput(TreePolicy):
    """The nodes with most expected tokens per second over all requests, by calibrated acceptance rates and step times.

    Depth and width follow the same measure, so nothing is drafted where drafts do not pay.
    """

    times: StepTimes
    calibrated = True
    shares_room = True
    whole_chains = True
    sampled_widths = (1,) * DEPTH
    needs = frozenset({Need.STEP_TIMES})

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Throughput:
        assert context.times is not None
        return cls(context.times)

    @property
    def adaptive(self) -> bool:
        return True

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        forest = step.forest
        # Chances fall along a path. Where they do not, the stable sort keeps parents before their children.
        ranked = forest.ranked(forest.chances, 0.0)
        best = forest.best(ranked, np.minimum(ranked.count, step.limits))[: max(step.room, 0)]
        others = step.other_tokens
        count = self.times.best_node_count(ranked.value[best], others, others, step.context, step.overhead)
        return forest.take(ranked, np.bincount(forest.tree[best[:count]], minlength=len(forest)))
