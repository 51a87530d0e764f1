"""One budget for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.trees.candidates import Candidates
from jaxspec.sched.trees.forest import Forest


@dataclass(frozen=True, slots=True)
class GlobalGreedy:
    """AdaServe's baseline GlobalGreedy (§6): the best nodes over all requests by path probability, which is AdaServe's
    own selection without the promises. It maximises the expected number of accepted tokens under the budget.

    `nodes` bounds the draft nodes of all requests together, roots not among them; None: the step's budget does.
    Equals go to the earlier request.
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
        ranked = forest.ranked()
        best = forest.best(ranked, np.minimum(ranked.count, limits))[:budget]
        return forest.take(ranked, np.bincount(forest.tree[best], minlength=len(forest)))
