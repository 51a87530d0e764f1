"""Tree policies and the preorder of what they choose, against brute force on small random forests."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import forests
from helpers.candidate_trees import SEEDS, best_by_size, check, forest, levels, preorder, random_candidates, worth
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.chain import Chain
from jaxspec.sched.spec.trees.equal_greedy import EqualGreedy
from jaxspec.sched.spec.trees.fixed import Fixed
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.global_greedy import GlobalGreedy
from jaxspec.sched.spec.trees.policy import TreePolicy
from jaxspec.sched.spec.trees.preorder import preorders


@settings(deadline=None, max_examples=60)
@given(forest(), st.integers(0, 20))
def test_equal_greedy_is_the_best_for_each(given_: tuple[list[Candidates], list[int]], room: int) -> None:
    trees, limits = given_
    masks = check(EqualGreedy(room), trees, limits)
    unset = check(EqualGreedy(), trees, limits, room)
    assert all((a == b).all() for a, b in zip(masks, unset, strict=True))
    assert sum(mask.sum() for mask in masks) <= room
    share = room // max(1, sum(len(t) > 0 and limit > 0 for t, limit in zip(trees, limits, strict=True)))
    for tree, mask, limit in zip(trees, masks, limits, strict=True):
        size = max(min(share, limit), 0)
        assert mask.sum() == min(size, np.isfinite(tree.logprob).sum())
        assert worth(tree, mask) == pytest.approx(max(best_by_size(tree, size)))


@settings(deadline=None, max_examples=60)
@given(forest(), st.integers(0, 20))
def test_global_greedy_is_the_best_for_all(given_: tuple[list[Candidates], list[int]], room: int) -> None:
    trees, limits = given_
    masks = check(GlobalGreedy(room), trees, limits)
    unset = check(GlobalGreedy(), trees, limits, room)
    assert all((a == b).all() for a, b in zip(masks, unset, strict=True))
    assert sum(mask.sum() for mask in masks) <= room
    tables = [best_by_size(tree, max(limit, 0)) for tree, limit in zip(trees, limits, strict=True)]
    best = max(
        sum(table[k] for table, k in zip(tables, sizes, strict=True))
        for sizes in product(*(range(len(table)) for table in tables))
        if sum(sizes) <= room
    )
    assert sum(worth(t, m) for t, m in zip(trees, masks, strict=True)) == pytest.approx(best)


@settings(deadline=None, max_examples=60)
@given(forest(12), st.integers(0, 5))
def test_a_chain_takes_the_best_child_of_each(given_: tuple[list[Candidates], list[int]], k: int) -> None:
    trees, limits = given_
    masks = check(Chain(k), trees, limits)
    for tree, mask, limit in zip(trees, masks, limits, strict=True):
        path = np.flatnonzero(mask)
        assert tree.parent[path].tolist() == [-1, *path[:-1]][: len(path)]
        for node in path:
            siblings = tree.parent == tree.parent[node]
            assert tree.logprob[node] == tree.logprob[siblings].max()
        if len(path) < min(k, limit):  # it ended early, for want of children
            last = path[-1] if len(path) else -1
            assert not np.isfinite(tree.logprob[tree.parent == last]).any()


@settings(deadline=None, max_examples=60)
@given(forest(12), st.lists(st.integers(1, 3), max_size=4))
def test_fixed_keeps_the_best_children_of_each(given_: tuple[list[Candidates], list[int]], widths: list[int]) -> None:
    trees, limits = given_
    policy = Fixed(tuple(widths))
    cut = check(policy, trees, limits)
    whole = check(policy, trees, [99] * len(trees))
    for tree, part, mask, limit in zip(trees, cut, whole, limits, strict=True):
        assert part.sum() == min(max(limit, 0), mask.sum())
        assert not (part & ~mask).any()
        level = [-1]
        for width in [*widths, 0]:
            below: list[int] = []
            for node in level:
                children = np.flatnonzero((tree.parent == node) & np.isfinite(tree.logprob))
                kept = [int(i) for i in children if mask[i]]
                assert len(kept) == min(width, len(children))
                assert sorted(tree.logprob[kept]) == sorted(tree.logprob[children])[len(children) - len(kept) :]
                below += kept
            if part[below].any():  # a level is begun only when those above are whole
                assert part[level].all() or level == [-1]
            level = below


@settings(deadline=None, max_examples=30)
@given(forest(12), st.integers(0, 5))
def test_a_chain_is_a_fixed_tree_one_wide_and_off_is_nothing(
    given_: tuple[list[Candidates], list[int]], k: int
) -> None:
    trees, limits = given_
    for a, b in zip(check(Chain(k), trees, limits), check(Fixed((1,) * k), trees, limits), strict=True):
        np.testing.assert_array_equal(a, b)


def test_specinfer_s_default_shape():
    """Four children everywhere: three branches from the third level on."""
    rng = np.random.default_rng(0)
    size = 4 + 16 + 64 + 256
    parent = np.arange(size, dtype=np.int32) // 4 - 1
    logprob = np.log(rng.uniform(0.1, 0.9, size).astype(np.float32))
    for i in range(4, size):
        logprob[i] += logprob[parent[i]]
    tree = Candidates(np.arange(size, dtype=np.int32), parent, logprob)
    (mask,) = check(Fixed(), [tree], [99])
    assert np.bincount(preorder(tree, mask).depth).tolist() == [0, 1, 1, 3, 3]


@pytest.mark.parametrize("policy", [EqualGreedy(1), GlobalGreedy(1), Chain(1), Fixed((1,))])
def test_a_child_that_rounding_lifts_above_its_parent_stays_after_it(policy: TreePolicy):
    tree = Candidates(np.asarray([3, 4], np.int32), np.asarray([-1, 0], np.int32), np.asarray([-1.0, -0.9], np.float32))
    (mask,) = check(policy, [tree], [5])
    assert mask.tolist() == [True, False]


@settings(deadline=None, max_examples=100)
@given(SEEDS, st.integers(0, 20))
def test_preorder(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_candidates(rng, size)
    chosen = rng.random(size) < 0.8
    for i, p in enumerate(tree.parent):
        chosen[i] &= p < 0 or chosen[p]
    draft = preorder(tree, chosen)

    assert sorted(draft.source) == np.flatnonzero(chosen).tolist()
    np.testing.assert_array_equal(draft.token, tree.token[draft.source])
    above = [-1 if p < 0 else draft.source[p] for p in draft.parent]
    np.testing.assert_array_equal(above, tree.parent[draft.source])
    parents = [-1, *(int(p) + 1 for p in draft.parent)]  # with the root in front
    np.testing.assert_array_equal(draft.depth, forests.depths(parents)[1:])
    np.testing.assert_array_equal(draft.subtree, forests.subtree_sizes(parents)[1:])
    for node, (before, parent) in enumerate(zip(range(len(parents)), parents[1:], strict=False), start=1):
        assert parent in forests.path_to(parents, before), f"node {node} is out of preorder"
    for parent in {*draft.parent.tolist()}:  # siblings keep their order
        assert (np.diff(draft.source[draft.parent == parent]) > 0).all()
    for array in (draft.token, draft.depth, draft.subtree, draft.parent, draft.source):
        assert array.dtype == np.int32 and array.shape == (chosen.sum(),)


@settings(deadline=None, max_examples=50)
@given(forest(12), SEEDS)
def test_a_forest_is_its_trees(given_: tuple[list[Candidates], list[int]], seed: int) -> None:
    trees, rng = given_[0], np.random.default_rng(seed)
    woods = Forest(trees)
    assert len(woods) == len(trees) and all(a is b for a, b in zip(woods, trees, strict=True))
    assert woods.levels().tolist() == [levels(t) for t in trees]
    for found, tree in zip(woods.split(woods.falling()), trees, strict=True):
        assert found.tolist() == tree.falling()
    ranked = woods.ranked()
    for tree, first, count in zip(trees, woods.first.tolist(), ranked.count.tolist(), strict=False):
        nodes, values = tree.best(99)
        assert (ranked.order[first : first + count] - first).tolist() == nodes
        assert ranked.value[first : first + count].tolist() == values
    masks = [tree.mask(tree.best(int(rng.integers(13)))[0]) for tree in trees]
    for draft, tree, mask in zip(preorders(woods, masks), trees, masks, strict=True):
        alone = preorder(tree, mask)
        for field in ("token", "depth", "subtree", "parent", "source"):
            np.testing.assert_array_equal(getattr(draft, field), getattr(alone, field))
    other = woods.calibrated(rng.uniform(size=len(woods.tree)))
    for tree, own, likely in zip(other, trees, woods.split(other.logprob), strict=True):
        assert tree.token is own.token and tree.logprob.tolist() == likely.tolist()


def test_chains_are_the_same_next_to_a_tree_that_branches() -> None:
    def tree(*parents: int) -> Candidates:
        n = len(parents)
        return Candidates(np.arange(n, dtype=np.int32), np.asarray(parents, np.int32), np.zeros(n))

    chains = [tree(-1, 0, 1), tree(), tree(-1), tree(-1, 0)]
    branches = tree(-1, 0, 0, -1)
    alone = preorders(Forest(chains), [np.ones(len(c), bool) for c in chains])
    *together, branched = preorders(Forest([*chains, branches]), [np.ones(len(c), bool) for c in [*chains, branches]])
    assert branched.subtree.tolist() == [3, 1, 1, 1] and branched.parent.tolist() == [-1, 0, 0, -1]
    for one, other in zip(alone, together, strict=True):
        for field in ("token", "depth", "subtree", "parent", "source"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
    assert alone[0].subtree.tolist() == [3, 2, 1] and alone[0].depth.tolist() == [1, 2, 3]


def test_preorder_refuses_what_is_no_tree():
    tree = Candidates(np.asarray([3, 4, 4], np.int32), np.asarray([-1, 0, 0], np.int32), np.zeros(3, np.float32))
    assert preorder(tree, np.asarray([True, True, False])).token.tolist() == [3, 4]
    with pytest.raises(ValueError, match="parent"):
        preorder(tree, np.asarray([False, True, False]))
    with pytest.raises(ValueError, match="same token"):
        preorder(tree, np.asarray([True, True, True]))
    with pytest.raises(ValueError, match="mask"):
        preorder(tree, np.asarray([0, 1]))
    for parent in ([0, -1], [1, -1]):
        with pytest.raises(ValueError, match="come before"):
            preorder(Candidates(tree.token[:2], np.asarray(parent, np.int32), tree.logprob[:2]), np.ones(2, bool))


@pytest.mark.parametrize(
    "make", [lambda: Chain(-1), lambda: Fixed((1, 0)), lambda: EqualGreedy(-1), lambda: GlobalGreedy(-1)]
)
def test_settings_must_make_sense(make):
    with pytest.raises(ValueError, match=r"negative|at least one wide"):
        make()
