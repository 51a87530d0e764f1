"""Trees for the measurements, as lists of parents in preorder: -1 for the root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.step.packing import SamplingInputs, Tree


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def star(count: int) -> list[int]:
    """A root whose children are all the other nodes."""
    return [-1] + [0] * (count - 1)


def balanced(count: int, root: int = 0, parent: int = -1) -> list[int]:
    """A binary tree of least depth."""
    left = count // 2
    out = [parent]
    for size, start in ((left, root + 1), (count - 1 - left, root + 1 + left)):
        if size:
            out += balanced(size, start, root)
    return out


def random(rng: np.random.Generator, count: int) -> list[int]:
    """Each node's parent is on the path from the root to the node before it."""
    parents = [-1]
    for i in range(1, count):
        path = [i - 1]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        parents.append(int(rng.choice(path)))
    return parents


def depths(parents: Sequence[int]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def subtrees(parents: Sequence[int]) -> list[int]:
    """Nodes of each node's subtree, itself included."""
    out = [1] * len(parents)
    for i in range(len(parents) - 1, 0, -1):
        out[parents[i]] += out[i]
    return out


def tree(parents: Sequence[int], tokens: Sequence[int], committed: int, pages: np.ndarray, rows: Sequence[int]) -> Tree:
    """A tree of one known token, the root, and drafts. rows: nodes whose logits are computed."""
    known = [1] + [0] * (len(parents) - 1)
    token, depth, subtree, known, row, parent = (
        np.asarray(x, np.int32) for x in (tokens, depths(parents), subtrees(parents), known, rows, parents)
    )
    return Tree(token, depth, subtree, known, committed, pages, row, SamplingInputs(), parent=parent)


def shaped(count: int, trees: int, most_rows: int) -> tuple[list[int], list[int]]:
    """Parents of a tree of `count` nodes, and the nodes whose logits are computed, so that all trees together have at
    most `most_rows` of them."""
    parents = balanced(count)
    if trees * count <= most_rows:
        return parents, list(range(count))
    inner = sorted(set(parents) - {-1})
    return (parents, inner) if trees * len(inner) <= most_rows else (star(count), [0])
