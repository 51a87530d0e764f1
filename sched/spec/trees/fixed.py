"""A tree of a shape known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Fixed:
    """SpecInfer's expansion (Miao et al., ASPLOS 2024): each node at depth i keeps its `widths[i]` most likely
    children, as far as the candidates have them; depth 0 is the root.

    Where a limit cuts the tree, whole levels come first and within the cut level the likelier paths.
    """

    widths: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.widths):
            raise ValueError(f"every level must be at least one wide, not {self.widths}")

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        return [c.mask(self._expand(c)[: max(limit, 0)]) for c, limit in zip(candidates, limits, strict=True)]

    def _expand(self, candidates: Candidates) -> list[int]:
        """The tree's nodes by levels, each level best first."""
        value = candidates.falling()
        children: list[list[int]] = [[] for _ in range(len(value) + 1)]  # the last, index -1, are the root's
        for i, (parent, own) in enumerate(zip(candidates.parent.tolist(), value, strict=True)):
            if own > float("-inf"):
                children[parent].append(i)
        nodes: list[int] = []
        level = [-1]
        for width in self.widths:
            kept = (sorted(children[node], key=value.__getitem__, reverse=True)[:width] for node in level)
            level = sorted((node for nodes in kept for node in nodes), key=value.__getitem__, reverse=True)
            if not level:
                break
            nodes += level
        return nodes
