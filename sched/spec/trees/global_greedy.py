"""GlobalGreedy: the most likely nodes over all requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.slots import TREES
from jaxspec.sched.spec.trees.policy import SharedNodes, StepCandidates


@TREES.register("global_greedy")
@dataclass(frozen=True, slots=True)
class GlobalGreedy(SharedNodes):
    """AdaServe's baseline GlobalGreedy (§6): the best nodes over all requests by path probability.

    It is AdaServe's selection without SLOs, and maximises the expected number of accepted tokens under the budget. Ties
    go to the earlier request.
    """

    shares_room = True

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        forest = step.forest
        ranked = forest.ranked()
        best = forest.best(ranked, np.minimum(ranked.count, step.limits))[: self.sharable(step)]
        return forest.take(ranked, np.bincount(forest.tree[best], minlength=len(forest)))
