"""EqualGreedy: the same number of nodes for every request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.slots import TREES
from jaxspec.sched.spec.trees.policy import SharedNodes, StepCandidates


@TREES.register("equal_greedy")
@dataclass(frozen=True, slots=True)
class EqualGreedy(SharedNodes):
    """AdaServe's baseline EqualGreedy (§6): splits the nodes evenly; each request takes its best by path probability.

    Per request that is the reranking of EAGLE-2 (Li et al., EMNLP 2024), which has no budget for a step. A request
    without candidates or with a limit of 0 gets no share. What the division or a limit leaves over is not used.
    """

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        forest = step.forest
        sharing = int(np.count_nonzero((np.diff(forest.first) > 0) & (np.asarray(step.limits) > 0)))
        ranked = forest.ranked()
        share = self.sharable(step) // max(sharing, 1)
        return forest.take(ranked, np.minimum(ranked.count, np.minimum(share, step.limits)))
