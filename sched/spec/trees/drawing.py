"""What was drawn, as it was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Drawing:
    """All candidates, or the first that fit, down to `levels` levels.

    Rejection sampling keeps the target's distribution only if the choice of nodes does not depend on what was drawn.
    """

    levels: int

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        return [c.mask(self._first(c, max(limit, 0))) for c, limit in zip(candidates, limits, strict=True)]

    def _first(self, candidates: Candidates, limit: int) -> list[int]:
        there = np.isfinite(candidates.logprob) & (np.asarray(candidates.depths()) <= self.levels)
        return np.flatnonzero(there)[:limit].tolist()
