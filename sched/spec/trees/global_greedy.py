"""One budget for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import SharedNodes


@dataclass(frozen=True, slots=True)
class GlobalGreedy(SharedNodes):
    """AdaServe's baseline GlobalGreedy (§6): the best nodes over all requests by path probability, which is AdaServe's
    own selection without the promises. It maximises the expected number of accepted tokens under the budget.

    Equals go to the earlier request.
    """

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        forest = Forest.of(candidates)
        ranked = forest.ranked()
        best = forest.best(ranked, np.minimum(ranked.count, limits))[: self.within(room)]
        return forest.take(ranked, np.bincount(forest.tree[best], minlength=len(forest)))
