"""Random candidate trees, and brute-force references for selections of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import exp

import numpy as np
from hypothesis import strategies as st

from helpers import forests
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy
from jaxspec.sched.spec.trees.preorder import preorders

SEEDS = st.integers(0, 2**32)


#: Few probabilities, so that ties, certain tokens (1) and impossible ones (0) occur.
STEPS = np.asarray([0.0, 0.1, 0.3, 0.5, 0.5, 0.9, 1.0])


def random_candidates(rng: np.random.Generator, size: int) -> Candidates:
    """A random tree of `size` candidates in a random order that has parents before children."""
    parents = forests.random_parents(rng, size + 1)
    order, ready = [], [i for i, p in enumerate(parents) if p == 0]
    while ready:
        order.append(ready.pop(rng.integers(len(ready))))
        ready += [i for i, p in enumerate(parents) if p == order[-1]]
    index = {0: -1} | {node: i for i, node in enumerate(order)}
    tokens = forests.draft_tokens(rng, parents, 0, 50, lambda path: 7)
    step = np.concatenate([[1.0], rng.choice(STEPS, size)])
    path = [np.prod(step[forests.path_to(parents, node)]) for node in order]
    with np.errstate(divide="ignore"):
        logprob = np.log(np.asarray(path, np.float32))
    return Candidates(
        np.asarray([tokens[node] for node in order], np.int32),
        np.asarray([index[parents[node]] for node in order], np.int32),
        logprob,
    )


def closed(candidates: Candidates, mask: np.ndarray) -> bool:
    return all(p < 0 or mask[p] for p in candidates.parent[mask])


def worth(candidates: Candidates, mask: np.ndarray) -> float:
    """Expected number of accepted tokens."""
    return float(np.exp(candidates.logprob[mask]).sum())


def best_by_size(candidates: Candidates, limit: int) -> list[float]:
    """The largest expected number of accepted tokens of a closed subset with 0, 1, …, `limit` nodes."""
    best = [0.0] + [-1.0] * min(limit, len(candidates))
    for bits in product([False, True], repeat=len(candidates)):
        mask = np.asarray(bits, bool)
        if mask.sum() < len(best) and closed(candidates, mask):
            best[mask.sum()] = max(best[mask.sum()], worth(candidates, mask))
    return best


def check(
    policy: TreePolicy, trees: list[Candidates], limits: list[int], room: int = 99, needs: list[float] | None = None
) -> list[np.ndarray]:
    """Run `policy.select` and check what holds for every tree policy. Returns the masks."""
    masks = select(policy, trees, limits, room, needs or [float("-inf")] * len(trees), len(trees))
    assert len(masks) == len(trees)
    for tree, mask, limit in zip(trees, masks, limits, strict=True):
        assert mask.shape == (len(tree),) and mask.dtype == bool
        assert closed(tree, mask)
        assert mask.sum() <= max(limit, 0)
        assert np.isfinite(tree.logprob[mask]).all()
    return masks


@st.composite
def forest(draw: st.DrawFn, most: int = 6) -> tuple[list[Candidates], list[int]]:
    rng = np.random.default_rng(draw(SEEDS))
    trees = [random_candidates(rng, n) for n in draw(st.lists(st.integers(0, most), max_size=4))]
    return trees, [draw(st.integers(-1, most)) for _ in trees]


def select(
    policy: TreePolicy, trees: Sequence[Candidates], limits: Sequence[int], budget: int, needs: Sequence[float],
    other_tokens: int,
) -> list[np.ndarray]:  # fmt: skip
    """The masks that the policy selects, one per tree."""
    forest = trees if isinstance(trees, Forest) else Forest(trees)
    return policy.select(StepCandidates(forest, limits, 10**6, budget, needs, other_tokens))


def optimal(candidates: Sequence[Candidates], verify_budget: int, needs: Sequence[float]) -> list[np.ndarray] | None:
    """AdaServe's Algorithm 1: most expected tokens, if the candidates' path probabilities were exact.

    Returns the masks of the selected nodes, or None (INVALID) if `verify_budget` tokens, roots included, do not give
    every request what it needs.
    """
    left = verify_budget - len(candidates)
    best = [c.best(len(c)) for c in candidates]
    chances = [[exp(value) for value in values] for _, values in best]
    taken = [0] * len(best)
    if left < 0:
        return None
    for i, need in enumerate(needs):
        expected = 1.0
        while expected < need:
            if not left or taken[i] == len(chances[i]):
                return None
            expected += chances[i][taken[i]]
            taken[i] += 1
            left -= 1
    rest = sorted((-p, i) for i, own in enumerate(chances) for p in own[taken[i] :])
    for _, i in rest[:left]:  # ties go to the earlier request
        taken[i] += 1
    return [c.mask(nodes[:k]) for c, (nodes, _), k in zip(candidates, best, taken, strict=True)]


def preorder(candidates: Candidates, chosen: np.ndarray) -> Draft:
    """`preorders` of one tree."""
    return preorders(Forest([candidates]), [chosen])[0]


def levels(candidates: Candidates) -> int:
    """Levels that have a node."""
    exists = (candidates.logprob > float("-inf")).tolist()
    return max((depth for depth, node in zip(candidates.depths(), exists, strict=True) if node), default=0)
