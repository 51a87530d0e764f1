"""Chain: a single path of most likely nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.slots import TREES, SlotContext
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import DEPTH, StepCandidates, TreePolicy


@TREES.register("chain")
@dataclass(frozen=True, slots=True)
class Chain(TreePolicy):
    """The most likely child at each level, `k` levels deep: speculative decoding (Leviathan et al., ICML 2023).

    Raises `ValueError` if `k` is negative.
    """

    k: int
    max_width = 1
    whole_chains = True
    sampled_widths = (1,) * DEPTH

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k must not be negative, got {self.k}")

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Chain:
        return cls(context.config.draft_depth or DEPTH)

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        return [c.mask(self._path(c, min(self.k, limit))) for c, limit in step]

    @staticmethod
    def _path(candidates: Candidates, length: int) -> list[int]:
        value = candidates.falling()
        parents: list[int] = candidates.parent.tolist()
        # Best child of each node, and its value. The last entry, index -1, is the root's.
        child, best = [-1] * (len(value) + 1), [float("-inf")] * (len(value) + 1)
        for i, (parent, own) in enumerate(zip(parents, value, strict=True)):
            if own > best[parent]:
                child[parent], best[parent] = i, own
        path: list[int] = []
        node = child[-1]
        while node >= 0 and len(path) < length:
            path.append(node)
            node = child[node]
        return path
