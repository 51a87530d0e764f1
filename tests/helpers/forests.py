"""Random token trees in preorder, with simple reference implementations of their properties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def random_parents(rng: np.random.Generator, size: int) -> list[int]:
    """Parents of a random tree in preorder: each node's parent is on the path from the root to the previous one."""
    parents = [-1]
    for i in range(1, size):
        path = [i - 1]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        parents.append(int(rng.choice(path)))
    return parents


def depths(parents: list[int]) -> np.ndarray:
    out: list[int] = []
    for p in parents:
        out.append(0 if p < 0 else out[p] + 1)
    return np.asarray(out, np.int32)


def subtree_sizes(parents: list[int]) -> np.ndarray:
    out = np.ones(len(parents), np.int32)
    for i in range(len(parents) - 1, 0, -1):
        out[parents[i]] += out[i]
    return out


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def draft_tokens(
    rng: np.random.Generator, parents: list[int], root: int, vocab: int, choice: Callable[[list[int]], int]
) -> list[int]:
    """Tokens for a tree: siblings differ, and about 60 % of the nodes hold the target's token, `choice(path)`."""
    tokens = [root]
    taken: dict[int, set[int]] = {}
    for node in range(1, len(parents)):
        parent = parents[node]
        used = taken.setdefault(parent, set())
        right = choice([tokens[i] for i in path_to(parents, parent)])
        token = right if rng.random() < 0.6 and right not in used else int(rng.integers(vocab))
        while token in used:
            token = int(rng.integers(vocab))
        used.add(token)
        tokens.append(token)
    return tokens
