"""The same budget for everyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.trees.candidates import Candidates
from jaxspec.sched.trees.forest import Forest


@dataclass(frozen=True, slots=True)
class EqualGreedy:
    """AdaServe's baseline EqualGreedy (§6): the budget is divided evenly among the requests, and each takes its own
    best nodes by path probability. That is the reranking of EAGLE-2 (Li et al., EMNLP 2024), which knows no budget.

    `nodes` bounds the draft nodes of all requests together, roots not among them; None: the step's budget does.
    A request that has no candidates or a limit of 0 takes no share; what a division or a limit leaves over is not
    spent.
    """

    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"the number of nodes is negative: {self.nodes}")

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], budget: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        budget = max(budget, 0) if self.nodes is None else self.nodes
        forest = Forest.of(candidates)
        sharing = int(np.count_nonzero((np.diff(forest.first) > 0) & (np.asarray(limits) > 0)))
        ranked = forest.ranked()
        return forest.take(ranked, np.minimum(ranked.count, np.minimum(budget // max(sharing, 1), limits)))
