"""From chosen candidates to draft trees in the order in which a step wants them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest


def preorder(candidates: Candidates, chosen: np.ndarray) -> Draft:
    """The chosen candidates as a draft tree; siblings keep their order. `chosen` is an `[n]` bool mask.

    ValueError if a chosen node's parent isn't chosen (or doesn't come before it), or if siblings hold the same token:
    both would then be accepted, and a step could not tell the path.
    """
    return preorders(Forest([candidates]), [chosen])[0]


def preorders(forest: Forest, chosen: Sequence[np.ndarray]) -> list[Draft]:
    """The same for every tree of a forest."""
    for c, mask in zip(forest, chosen, strict=True):
        if mask.shape != (len(c),) or mask.dtype != np.bool_:
            raise ValueError(f"expected a bool mask of {len(c)} candidates, got {mask.dtype} {mask.shape}")
    total = len(forest.tree)
    nodes = np.flatnonzero(forest.joined(chosen))
    count = len(nodes)
    # From here on nodes are numbered among the chosen, and `count` stands for the roots.
    number = np.full(total + 1, -1)
    number[nodes], number[total] = np.arange(count), count
    tree, depth = forest.tree[nodes], forest.depth[nodes]
    parent = number[forest.parent[nodes]]
    lost = (parent < 0) | ((parent >= np.arange(count)) & (parent < count))
    if lost.any():
        i = int(nodes[lost.argmax()])
        first = int(forest.first[forest.tree[i]])
        above = int(forest.parent[i]) - first
        raise ValueError(f"candidate {i - first} is chosen, but its parent {above} is not, or does not come before it")
    height = int(depth.max(initial=0))
    # Each node counts for itself and for all above it.
    size, above = np.ones(count + 1, np.intp), np.append(parent, count)
    up = above[:count]
    for _ in range(height - 1):
        size += np.bincount(up, minlength=count + 1)
        up = above[up]
    # A node stands behind its parent and the trees of its earlier siblings.
    family = np.where(parent == count, count + tree, parent)
    siblings = np.argsort(family, kind="stable")
    sizes, own = size[:count][siblings], family[siblings]
    before = np.cumsum(sizes) - sizes
    eldest = np.empty(count, bool)
    eldest[:1], eldest[1:] = True, own[1:] != own[:-1]
    before -= before[np.maximum.accumulate(np.where(eldest, np.arange(count), 0))]
    behind = np.empty(count, np.intp)
    behind[siblings] = before
    place = np.append(behind, -1)
    for _ in range(height):
        place[:count] = behind + 1 + place[parent]

    token = forest.joined([c.token for c in forest], np.int32)[nodes]
    together = np.sort(family * 2**32 + token)
    if (together[1:] == together[:-1]).any():
        raise ValueError("siblings hold the same token")
    counts = np.bincount(tree, minlength=len(forest))
    ends = np.cumsum(counts)
    starts = ends - counts
    rows = np.empty((5, count), np.int32)
    rows[:, starts[tree] + place[:count]] = (
        token, depth, size[:count], place[parent], nodes - forest.first[tree]
    )  # fmt: skip
    drafts = []
    for c, a, b in zip(forest, starts.tolist(), ends.tolist(), strict=True):
        token, depth, size, parent, source = rows[:, a:b]
        drafts.append(Draft(token, depth, size, parent, source, None if c.drawn is None else c.drawn[source]))
    return drafts
