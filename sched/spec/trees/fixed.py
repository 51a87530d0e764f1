"""Fixed: a tree of a predetermined shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.slots import TREES
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy

#: SpecInfer's expansion: children kept of each node, by depth.
SPECINFER = (1, 1, 3, 1, 1, 1, 1, 1)


@TREES.register("fixed")
@dataclass(frozen=True)
class Fixed(TreePolicy):
    """SpecInfer's expansion (Miao et al., ASPLOS 2024): a node at depth i keeps its `expansion[i]` likeliest children.

    Depth 0 is the root, so the default tree has 1 + 1 + 3 + 5 × 3 = 20 nodes. Draft models grow their candidates in
    this shape, n-gram lookup proposes a chain. A limit keeps whole levels from the top, and of the level it cuts the
    likeliest paths. Raises `ValueError` for a width below 1.
    """

    # The class keeps this default as its attribute, so no slots.
    expansion: tuple[int, ...] = SPECINFER
    sampled_widths = SPECINFER

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.expansion):
            raise ValueError(f"expansion: every level must be at least one wide, got {self.expansion}")

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        return [c.mask(self._expand(c)[: max(limit, 0)]) for c, limit in step]

    def _expand(self, candidates: Candidates) -> list[int]:
        """The tree's nodes level by level, each level best first."""
        value = candidates.falling()
        parents: list[int] = candidates.parent.tolist()
        # The last entry, index -1, holds the root's children.
        children: list[list[int]] = [[] for _ in range(len(value) + 1)]
        for i, (parent, own) in enumerate(zip(parents, value, strict=True)):
            if own > float("-inf"):
                children[parent].append(i)
        nodes: list[int] = []
        level = [-1]
        for width in self.expansion:
            kept = (sorted(children[node], key=value.__getitem__, reverse=True)[:width] for node in level)
            level = sorted((node for nodes in kept for node in nodes), key=value.__getitem__, reverse=True)
            if not level:
                break
            nodes += level
        return nodes
