"""Candidates of several drafters for the same request, as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.spec.drafter import Proposed
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest


@dataclass(frozen=True, slots=True)
class Part:
    """What one drafter proposed for a request.

    drafter     its index
    candidates  its own tree of n nodes, with the probabilities that it states
    node        `[n]` index of each of its nodes in the request's merged tree
    width       the width of its beam
    """

    drafter: int
    candidates: Candidates
    node: npt.NDArray[np.intp]
    width: int

    def of_merged(
        self, chosen: npt.NDArray[np.bool_], accepted: Sequence[int]
    ) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Mask `[n]` of its nodes among those `chosen` in the merged tree, and indices of its nodes among `accepted`,
        from the top down."""
        exists, path = np.isfinite(self.candidates.logprob), set(accepted)
        own = [i for i, at in enumerate(self.node.tolist()) if at in path and exists[i]] if path else []
        return chosen[self.node] & exists, own


class RequestTree(NamedTuple):
    """A request and the proposals that its tree is made of."""

    scheduled: ScheduledRequest
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Drafted:
    """The draft of a request in the current step: what was proposed, the mask of the nodes that are verified, and their
    tree."""

    parts: Sequence[Part]
    chosen: npt.NDArray[np.bool_]
    draft: Draft

    def proposers(self) -> list[list[int]]:
        """The drafters (indices) that proposed each node of `draft`."""
        return [
            [p.drafter for p in self.parts if (np.isfinite(p.candidates.logprob) & (p.node == node)).any()]
            for node in self.draft.source.tolist()
        ]


def by_request(proposed: Sequence[Proposed], forest: Forest) -> tuple[list[RequestTree], Forest]:
    """Merge the proposals of several drafters into one tree per request.

    `forest`: the proposals' trees, with the probabilities to use. Trees of the same request follow one another.
    """
    pairs = zip(proposed, forest, strict=True)
    groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[0].scheduled.request.id)]
    trees, candidates = list[RequestTree](), list[Candidates]()
    for group in groups:
        tree, nodes = merged([c for _, c in group]) if len(group) > 1 else (group[0][1], [np.arange(len(group[0][1]))])
        parts = [Part(p.drafter, p.candidates, node, p.width) for (p, _), node in zip(group, nodes, strict=True)]
        trees.append(RequestTree(group[0][0].scheduled, parts))
        candidates.append(tree)
    return trees, forest if len(groups) == len(proposed) else Forest(candidates)


def merged(trees: Sequence[Candidates]) -> tuple[Candidates, list[npt.NDArray[np.intp]]]:
    """One tree with the nodes of all trees, and for each of these the index of its nodes in it, `[n]`.

    Nodes with the same path are one node. It has the highest of their log-probabilities, which therefore still fall
    along a path. The trees must not be random draws (`drawn`).
    """
    place = dict[tuple[int, int], int]()
    token, parent, logprob = list[int](), list[int](), list[float]()
    nodes: list[npt.NDArray[np.intp]] = []
    for c in trees:
        own, tokens, parents = list[int](), list[int](c.token.tolist()), list[int](c.parent.tolist())
        for t, above, value in zip(tokens, parents, list[float](c.logprob.tolist()), strict=True):
            at = own[above] if above >= 0 else -1
            index = place.setdefault((at, t), len(token))
            if index == len(token):
                token.append(t)
                parent.append(at)
                logprob.append(value)
            elif value > logprob[index]:
                logprob[index] = value
            own.append(index)
        nodes.append(np.asarray(own, np.intp))
    tree = Candidates(np.asarray(token, np.int32), np.asarray(parent, np.int32), np.asarray(logprob))
    return tree, nodes
