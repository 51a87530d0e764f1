"""From chosen candidates to draft trees in preorder, as a step needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.sched.spec.trees.forest import Forest


def preorders(forest: Forest, chosen: Sequence[npt.NDArray[np.bool_]]) -> list[Draft]:
    """The chosen candidates of every tree, `[n]` masks, as draft trees; siblings keep their order.

    Raises `ValueError` if a chosen node's parent is not chosen or does not come before it, or if siblings have the same
    token: both would be accepted, and the accepted path would be ambiguous.
    """
    for c, mask in zip(forest, chosen, strict=True):
        if mask.shape != (len(c),) or mask.dtype != np.bool_:
            raise ValueError(f"expected a bool mask of {len(c)} candidates, got {mask.dtype} {mask.shape}")
    total = len(forest.tree)
    nodes = np.flatnonzero(forest.concat(chosen))
    count = len(nodes)
    # From here on, nodes are numbered among the chosen ones, and `count` stands for every root.
    number = np.full(total + 1, -1)
    number[nodes], number[total] = np.arange(count), count
    tree, depth = forest.tree[nodes], forest.depth[nodes]
    parent = number[forest.parent[nodes]]
    orphan = (parent < 0) | ((parent >= np.arange(count)) & (parent < count))
    if orphan.any():
        i = int(nodes[orphan.argmax()])
        first = int(forest.first[forest.tree[i]])
        above = int(forest.parent[i]) - first
        raise ValueError(f"candidate {i - first} is chosen, but its parent {above} is not, or does not come before it")
    token = forest.concat([c.token for c in forest], np.int32)[nodes]
    counts = np.bincount(tree, minlength=len(forest))
    # The same for siblings, different for others.
    family = np.where(parent == count, count + tree, parent)
    if count and np.bincount(family).max() > 1:
        sibling_tokens = np.sort(family * 2**32 + token)
        if (sibling_tokens[1:] == sibling_tokens[:-1]).any():
            raise ValueError("siblings have the same token")
        size, place = _sizes_and_places(parent, family, int(depth.max()))
    else:  # all trees are chains
        size, place = counts[tree] - depth + 1, np.append(depth - 1, -1)
    ends = np.cumsum(counts)
    starts = ends - counts
    rows = np.empty((5, count), np.int32)
    rows[:, starts[tree] + place[:count]] = token, depth, size, place[parent], nodes - forest.first[tree]
    drafts: list[Draft] = []
    for c, a, b in zip(forest, starts.tolist(), ends.tolist(), strict=True):
        token, depth, size, parent, source = rows[:, a:b]
        drafts.append(Draft(token, depth, size, parent, source, None if c.drawn is None else c.drawn[source]))
    return drafts


def _sizes_and_places(
    parent: npt.NDArray[np.intp], family: npt.NDArray[np.intp], height: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """`[n]` the sizes of the nodes' subtrees, and `[n + 1]` their places in their trees' preorder, -1 for the roots.

    `parent`: n for a root; `family`: the same number for siblings; `height`: levels of the highest tree.
    """
    count = len(parent)
    # Each node counts for itself and for all of its ancestors.
    size, parent_of = np.ones(count + 1, np.intp), np.append(parent, count)
    ancestor = parent_of[:count]
    for _ in range(height - 1):
        size += np.bincount(ancestor, minlength=count + 1)
        ancestor = parent_of[ancestor]
    # A node comes after its parent and the subtrees of its earlier siblings: `offset` is the size of those subtrees.
    by_family = np.argsort(family, kind="stable")
    sizes, families = size[:count][by_family], family[by_family]
    before = np.cumsum(sizes) - sizes
    is_first = np.empty(count, bool)
    is_first[:1], is_first[1:] = True, families[1:] != families[:-1]
    before -= before[np.maximum.accumulate(np.where(is_first, np.arange(count), 0))]
    offset = np.empty(count, np.intp)
    offset[by_family] = before
    place = np.append(offset, -1)
    for _ in range(height):
        place[:count] = offset + 1 + place[parent]
    return size[:count], place
