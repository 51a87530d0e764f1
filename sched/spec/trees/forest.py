"""Forest: the candidate trees of a step's requests as one set of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.candidates import Candidates

_EMPTY = float("-inf")

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Ranked:
    """The nodes of every tree, best first; ties keep the order of the candidates.

    order `[N]`          the nodes, tree after tree as in the forest
    rank  `[N]`          rank of each of those in its own tree, from 0
    value `[N]` float64  what they are ranked by
    count `[R]`          nodes of each tree that may be chosen, which are its first ones
    """

    order: npt.NDArray[np.intp]
    rank: npt.NDArray[np.intp]
    value: npt.NDArray[np.float64]
    count: npt.NDArray[np.intp]


class Forest(Sequence[Candidates]):
    """R trees with N nodes together. One numpy call handles them all: at these sizes a call costs as much as the
    arithmetic of ten trees.

    first   `[R + 1]` index of each tree's first node, and N
    tree    `[N]` index of each node's tree
    parent  `[N]` index among all nodes, N for a child of a root
    depth   `[N]` 1 for a child of a root
    logprob `[N]` as in `Candidates`

    Raises `ValueError` if a parent does not come before its child.
    """

    def __init__(self, trees: Sequence[Candidates]) -> None:
        self._trees, self._relabelled = list(trees), False
        self._chances: npt.NDArray[np.float64] | None = None
        sizes = [len(c) for c in trees]
        self.first = np.cumsum([0, *sizes])
        self.tree = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)  # int16 sorts faster
        above = self.concat([c.parent for c in trees], np.intp)
        self.parent = np.where(above < 0, len(above), above + self.first[self.tree])
        if not ((self.parent < np.arange(len(above))) | (above < 0)).all():
            raise ValueError("a candidate's parent does not come before it")
        self.logprob: _Floats = self.concat([c.logprob for c in trees])
        depth, self.height = np.zeros(len(above) + 1, np.int16), 0
        while ((deeper := depth[self.parent] + 1) != depth[:-1]).any():
            depth[:-1] = deeper
            self.height += 1
        self.depth = depth[:-1]

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

    def calibrated(self, chances: npt.NDArray[np.float64]) -> Self:
        """A copy whose nodes have these acceptance probabilities, `[N]` float64, and their logarithms as `logprob`."""
        other = copy(self)
        with np.errstate(divide="ignore"):  # empty places have probability 0
            other.logprob, other._relabelled, other._chances = np.log(chances), True, chances
        return other

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """P(accepted) of each node, `[N]`: calibrated, or else as stated by the drafter."""
        return np.exp(self.falling()) if self._chances is None else self._chances

    @staticmethod
    def concat(parts: Sequence[npt.NDArray[Any]], dtype: type | None = None) -> npt.NDArray[Any]:
        """`np.concatenate`, also for no arrays."""
        return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)

    def split(self, values: npt.NDArray[_Scalar]) -> list[npt.NDArray[_Scalar]]:
        """Views `[n]` of each tree's part of `values` `[N]`."""
        ends: list[int] = self.first.tolist()
        return [values[a:b] for a, b in pairwise(ends)]

    def propagate(self, own: _Floats, root: float, combine: Callable[[_Floats, _Floats], Any]) -> npt.NDArray[Any]:
        """`[N]`: from the root's value down, each node's own value combined with its parent's result."""
        out = np.append(own, root)
        for _ in range(self.height):  # each pass completes one more level
            out[:-1] = combine(own, out[self.parent])
        return out[:-1]

    def levels(self) -> npt.NDArray[np.int16]:
        """Levels of each tree that have a node, `[R]`."""
        out = np.zeros(len(self), np.int16)
        exists = self.logprob > _EMPTY
        np.maximum.at(out, self.tree[exists], self.depth[exists])
        return out

    def falling(self) -> npt.NDArray[np.float64]:
        """`[N]` float64, as `Candidates.falling`."""
        return self.propagate(self.logprob, 0.0, np.fmin)

    def ranked(self, value: npt.NDArray[np.float64] | None = None, empty: float = _EMPTY) -> Ranked:
        """Rank the nodes by `value` `[N]`, or else by `falling`. Nodes of the value `empty` may not be chosen."""
        value = self.falling() if value is None else value
        order = np.argsort(-value, kind="stable")
        order = order[np.argsort(self.tree[order], kind="stable")]
        rank = np.arange(len(order)) - self.first[self.tree]
        count = np.bincount(self.tree[value > empty], minlength=len(self._trees))
        return Ranked(order, rank, value[order], count)

    def take(self, ranked: Ranked, count: npt.NDArray[np.integer[Any]]) -> list[npt.NDArray[np.bool_]]:
        """The masks `[n]` of each tree's best `count[i]` nodes."""
        chosen = np.zeros(len(self.tree), bool)
        chosen[ranked.order[ranked.rank < count[self.tree]]] = True
        return self.split(chosen)

    def best(
        self, ranked: Ranked, below: npt.NDArray[np.integer[Any]], above: Sequence[int] | int = 0
    ) -> npt.NDArray[np.intp]:
        """Positions in `ranked` of nodes with ranks from `above` `[R]` up to, not including, `below` `[R]`; best first.

        Ties go to the earlier tree, and within a tree keep their order: of each tree, the first few nodes are taken.
        """
        eligible = (ranked.rank < below[self.tree]) & (ranked.rank >= np.broadcast_to(above, below.shape)[self.tree])
        positions = np.flatnonzero(eligible)
        return positions[np.argsort(-ranked.value[positions], kind="stable")]
