"""One budget for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class GlobalGreedy:
    """AdaServe's baseline GlobalGreedy (§6): the best nodes over all requests by path probability, which is AdaServe's
    own selection without the promises. It maximises the expected number of accepted tokens under the budget.

    `budget` counts the draft nodes of all requests together, roots not among them. Equals go to the earlier request.
    """

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"the budget is negative: {self.budget}")

    def select(self, candidates: Sequence[Candidates], limits: Sequence[int]) -> list[np.ndarray]:
        best = [c.best(min(limit, self.budget)) for c, limit in zip(candidates, limits, strict=True)]
        values = np.asarray([value for _, own in best for value in own])
        # Stable, so that a request's nodes stay in their order and what is taken of each is its first few.
        taken = np.argsort(-values, kind="stable")[: self.budget]
        of = np.repeat(np.arange(len(best)), [len(nodes) for nodes, _ in best])
        counts = np.bincount(of[taken], minlength=len(best)).tolist()
        return [c.mask(nodes[:k]) for c, (nodes, _), k in zip(candidates, best, counts, strict=True)]
