"""The candidate tree that a drafter proposes, and the draft tree selected from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_EMPTY = float("-inf")


@dataclass(frozen=True, slots=True)
class Candidates:
    """One request's candidate tree, without the root (the last known token).

    token   `[n]` int32; siblings have different tokens (`preorders` checks this for the chosen ones)
    parent  `[n]` int32, index of the parent candidate, -1 for a child of the root; parents come before their children,
            the order is otherwise free
    logprob `[n]` float32, the drafter's log-probability of the path from the root to the node, so it falls along a
            path. -inf marks an empty place of a beam of fixed shape: no policy selects it or a node below it.
    drawn   `[n]` int32 if the nodes were sampled, else None: index of the stored draft distribution that each was drawn
            from, for rejection sampling. Siblings are in the order in which they were drawn.
    """

    token: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.floating[Any]]
    drawn: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.token)

    def depths(self) -> list[int]:
        """The level of each node `[n]`, 1 for children of the root."""
        out: list[int] = []
        parents: list[int] = self.parent.tolist()
        for parent in parents:
            out.append(1 if parent < 0 else out[parent] + 1)
        return out

    def mask(self, nodes: Iterable[int] = ()) -> npt.NDArray[np.bool_]:
        """The `[n]` mask of these nodes."""
        chosen = np.zeros(len(self.token), bool)
        chosen[list(nodes)] = True
        return chosen

    def truncated(self, levels: int) -> Self:
        """Without the nodes below `levels` levels: their places are empty."""
        keep = np.asarray(self.depths()) <= levels
        if keep.all():
            return self
        return replace(self, logprob=np.where(keep, self.logprob, -np.inf).astype(np.float32))

    def falling(self) -> list[float]:
        """The log-probabilities `[n]`, each at most its parent's, and without NaN.

        Rounding can lift a child above its parent; a tree cut at a threshold would then keep the child without the
        parent.
        """
        out = [0.0] * (len(self.token) + 1)  # the last entry, index -1, is the root's
        logprobs: list[float] = self.logprob.tolist()
        parents: list[int] = self.parent.tolist()
        for i, (own, parent) in enumerate(zip(logprobs, parents, strict=True)):
            above = out[parent]
            out[i] = own if own < above else above
        out.pop()
        return out

    def best(self, count: int) -> tuple[list[int], list[float]]:
        """The `count` most likely nodes (or all, if there are fewer), best first, and their `falling` values.

        Ties keep the order of the candidates, so a parent always comes before its child.
        """
        value = self.falling()
        nodes = [i for i in sorted(range(len(value)), key=value.__getitem__, reverse=True) if value[i] > _EMPTY]
        nodes = nodes[: max(count, 0)]
        return nodes, [value[i] for i in nodes]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft tree in depth-first preorder, without the root. All arrays are `[m]` int32.

    token
    depth   1 for a child of the root
    subtree size of the subtree, the node included
    parent  index in these arrays, -1 for a child of the root
    source  index of the node among the candidates
    drawn   the candidates' `drawn` of the node, or None
    """

    token: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    subtree: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    drawn: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.token)
