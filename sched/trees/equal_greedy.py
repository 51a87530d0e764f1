"""The same budget for everyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class EqualGreedy:
    """AdaServe's baseline EqualGreedy (§6): the budget is divided evenly among the requests, and each takes its own
    best nodes by path probability. That is the reranking of EAGLE-2 (Li et al., EMNLP 2024), which knows no budget.

    `budget` counts the draft nodes of all requests together, roots not among them. A request that has no candidates or
    a limit of 0 takes no share; what a division or a limit leaves over is not spent.
    """

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"the budget is negative: {self.budget}")

    def select(self, candidates: Sequence[Candidates], limits: Sequence[int]) -> list[np.ndarray]:
        pairs = list(zip(candidates, limits, strict=True))
        share = self.budget // max(sum(len(c) > 0 and limit > 0 for c, limit in pairs), 1)
        return [c.mask(c.best(min(share, limit))[0]) for c, limit in pairs]
