"""The candidate tree as a drafter made it, and a part of it in the order in which a step wants it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_DEAD = float("-inf")


@dataclass(frozen=True, slots=True)
class Candidates:
    """One request's candidate tree. The root (the last known token) is not among them.

    token   `[n]` int32; siblings hold different tokens, which `preorder` verifies of those chosen
    parent  `[n]` int32, index among the candidates, -1 for a child of the root; parents come before their children,
            in any order otherwise
    logprob `[n]` float32, of the whole path from the root to the node by the drafter, so it falls along a path.
            -inf marks a place that a beam of fixed shape left empty: no policy chooses it, nor anything below it.
    drawn   `[n]` int32, of nodes drawn at random: which stored distribution of the drafter each came from (rejection
            sampling needs it); siblings then stand in the order in which they were drawn. None of other nodes.
    """

    token: np.ndarray
    parent: np.ndarray
    logprob: np.ndarray
    drawn: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token)

    def depths(self) -> list[int]:
        """The level of each node `[n]`, 1 for children of the root."""
        out: list[int] = []
        for parent in self.parent.tolist():
            out.append(1 if parent < 0 else out[parent] + 1)
        return out

    @property
    def levels(self) -> int:
        """Levels that hold a node."""
        there = self.logprob > _DEAD
        return max((d for d, here in zip(self.depths(), there.tolist(), strict=True) if here), default=0)

    def mask(self, nodes: Iterable[int] = ()) -> np.ndarray:
        """The `[n]` bool mask of these nodes."""
        chosen = np.zeros(len(self.token), bool)
        chosen[list(nodes)] = True
        return chosen

    def falling(self) -> list[float]:
        """The log-probabilities `[n]`, no child's above its parent's: rounding can lift it, and then a tree cut at a
        threshold would lose the parent and keep the child. No NaN either."""
        out = [0.0] * (len(self.token) + 1)  # the last, index -1, is the root's
        for i, (own, parent) in enumerate(zip(self.logprob.tolist(), self.parent.tolist(), strict=True)):
            above = out[parent]
            out[i] = own if own < above else above
        out.pop()
        return out

    def best(self, count: int) -> tuple[list[int], list[float]]:
        """The `count` most likely nodes (fewer if there are fewer), best first, and their `falling` values.

        Equals stay in the order of the candidates, so a parent always comes before its child.
        """
        value = self.falling()
        nodes = [i for i in sorted(range(len(value)), key=value.__getitem__, reverse=True) if value[i] > _DEAD]
        nodes = nodes[: max(count, 0)]
        return nodes, [value[i] for i in nodes]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft tree in depth-first preorder, without the root. All arrays are `[m]` int32.

    token, and depth (1 for a child of the root), subtree (size, the node itself included), parent (index in these
    arrays, -1 for a child of the root); source is the index of each node among the candidates, drawn their `drawn`.
    """

    token: np.ndarray
    depth: np.ndarray
    subtree: np.ndarray
    parent: np.ndarray
    source: np.ndarray
    drawn: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token)
