"""A single path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Chain:
    """The most likely child at each level, `k` deep: speculative decoding as it began (Leviathan et al., ICML 2023)."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"the chain's length is negative: {self.k}")

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        return [c.mask(self._path(c, min(self.k, limit))) for c, limit in zip(candidates, limits, strict=True)]

    @staticmethod
    def _path(candidates: Candidates, length: int) -> list[int]:
        value = candidates.falling()
        # The best child of each node and its value; the last, index -1, are the root's.
        child, best = [-1] * (len(value) + 1), [float("-inf")] * (len(value) + 1)
        for i, (parent, own) in enumerate(zip(candidates.parent.tolist(), value, strict=True)):
            if own > best[parent]:
                child[parent], best[parent] = i, own
        path: list[int] = []
        node = child[-1]
        while node >= 0 and len(path) < length:
            path.append(node)
            node = child[node]
        return path
