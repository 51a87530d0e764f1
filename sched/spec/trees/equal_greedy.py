"""The same budget for everyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import SharedNodes


@dataclass(frozen=True, slots=True)
class EqualGreedy(SharedNodes):
    """AdaServe's baseline EqualGreedy (§6): the budget is divided evenly among the requests, and each takes its own
    best nodes by path probability. That is the reranking of EAGLE-2 (Li et al., EMNLP 2024), which knows no budget.

    A request that has no candidates or a limit of 0 takes no share; what a division or a limit leaves over is not
    spent.
    """

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        forest = Forest.of(candidates)
        sharing = int(np.count_nonzero((np.diff(forest.first) > 0) & (np.asarray(limits) > 0)))
        ranked = forest.ranked()
        return forest.take(ranked, np.minimum(ranked.count, np.minimum(self.within(room) // max(sharing, 1), limits)))
