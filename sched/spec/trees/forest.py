"""The candidate trees of all requests of a step, for what is reckoned of every node at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, Self, overload

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates

_DEAD = float("-inf")


class Ranked(NamedTuple):
    """The nodes of every tree, best first; equals stay in the order of the candidates.

    order `[N]`: the nodes, tree after tree as in the forest; rank `[N]`: the place of each of those in its own tree;
    value `[N]` float64: how good each of those is; count `[R]`: nodes of each tree that may be chosen, its first ones.
    """

    order: np.ndarray
    rank: np.ndarray
    value: np.ndarray
    count: np.ndarray


class Forest(Sequence[Candidates]):
    """R trees, of N nodes together. At these sizes a call of numpy costs as much as the arithmetic of ten trees, so one
    call does for all.

    first `[R + 1]`: where each tree begins among the nodes, and N; tree `[N]`: whose a node is; parent `[N]`: among all
    nodes, N for a child of a root; depth `[N]`: 1 for those; logprob `[N]`, as in `Candidates`.
    """

    def __init__(self, trees: Sequence[Candidates]) -> None:
        self._trees, self._relabelled = list(trees), False
        sizes = [len(c) for c in trees]
        self.first = np.cumsum([0, *sizes])
        self.tree = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)  # small numbers are sorted faster
        above = self.joined([c.parent for c in trees], np.intp)
        self.parent = np.where(above < 0, len(above), above + self.first[self.tree])
        if not ((self.parent < np.arange(len(above))) | (above < 0)).all():
            raise ValueError("a candidate's parent does not come before it")
        self.logprob = self.joined([c.logprob for c in trees])
        depth, self.height = np.zeros(len(above) + 1, np.int16), 0
        while ((deeper := depth[self.parent] + 1) != depth[:-1]).any():
            depth[:-1] = deeper
            self.height += 1
        self.depth = depth[:-1]

    @classmethod
    def of(cls, trees: Sequence[Candidates]) -> Forest:
        return trees if isinstance(trees, Forest) else cls(trees)

    def __len__(self) -> int:
        return len(self.first) - 1

    @overload
    def __getitem__(self, index: int) -> Candidates: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidates]: ...
    def __getitem__(self, index: int | slice) -> Candidates | Sequence[Candidates]:
        if self._relabelled:
            parts = zip(self._trees, self.split(self.logprob), strict=True)
            self._trees, self._relabelled = [replace(c, logprob=own) for c, own in parts], False
        return self._trees[index]

    def likely(self, logprob: np.ndarray) -> Self:
        """The same trees with other log-probabilities `[N]` float64."""
        other = copy(self)
        other.logprob, other._relabelled = logprob, True
        return other

    @staticmethod
    def joined(parts: Sequence[np.ndarray], dtype: type | None = None) -> np.ndarray:
        return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Views `[n]` of each tree's part of `[N]`."""
        ends = self.first.tolist()
        return [values[a:b] for a, b in pairwise(ends)]

    def down(self, own: np.ndarray, root: float, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """`[N]`: from the `root` on, each node's own value combined with what its parent got."""
        out = np.append(own, root)
        for _ in range(self.height):  # each time, one more level is right
            out[:-1] = combine(own, out[self.parent])
        return out[:-1]

    def levels(self) -> np.ndarray:
        """Levels of each tree that hold a node, `[R]`."""
        out = np.zeros(len(self), np.int16)
        there = self.logprob > _DEAD
        np.maximum.at(out, self.tree[there], self.depth[there])
        return out

    def falling(self) -> np.ndarray:
        """`[N]` float64: as `Candidates.falling`."""
        return self.down(self.logprob, 0.0, np.fmin)

    def ranked(self, value: np.ndarray | None = None, dead: float = _DEAD) -> Ranked:
        """By `value [N]`, or else by `falling`; nodes of the value `dead` may not be chosen."""
        value = self.falling() if value is None else value
        order = np.argsort(-value, kind="stable")
        order = order[np.argsort(self.tree[order], kind="stable")]
        rank = np.arange(len(order)) - self.first[self.tree]
        count = np.bincount(self.tree[value > dead], minlength=len(self._trees))
        return Ranked(order, rank, value[order], count)

    def take(self, ranked: Ranked, count: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The masks `[n]` bool of each tree's best `count[i]` nodes."""
        chosen = np.zeros(len(self.tree), bool)
        chosen[ranked.order[ranked.rank < np.asarray(count)[self.tree]]] = True
        return self.split(chosen)

    def best(self, ranked: Ranked, below: np.ndarray, above: Sequence[int] | int = 0) -> np.ndarray:
        """Places in `ranked`, best first over all trees, of each tree's nodes of ranks from `above [R]` to `below [R]`.

        Equals go to the earlier tree, and within one stay in their order, so what is taken of each is its first few.
        """
        there = (ranked.rank < below[self.tree]) & (ranked.rank >= np.broadcast_to(above, below.shape)[self.tree])
        places = np.flatnonzero(there)
        return places[np.argsort(-ranked.value[places], kind="stable")]
