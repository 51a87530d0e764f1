"""What a step takes from the one before on the device is what the host would have packed, had it waited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched.plan import FIRST_DRAFT
from jaxspec.sched.request import UNKNOWN
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.ahead import NewTokens, catch_up, new_tokens, settle
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.packing import SamplingInputs, Tree, pack
from jaxspec.step.tree import accept, ancestors

PAGE, MOST = 4, 6
SHAPE = BatchShape(64, 64, 5, 16)
ROUND = BatchShape(64, 5, 5, 16)
SAMPLING = SamplingInputs()


@jax.jit
def _given(buffer: Any, sampled: Any) -> NewTokens:
    batch = Batch.unpack(buffer, SHAPE)
    accepted = accept(batch.token, batch.known, batch.parent_row, sampled, ancestors(batch.subtree))
    return new_tokens(batch, sampled, accepted, MOST)


@jax.jit
def _settled(buffer: Any, before: NewTokens, chains: Any) -> Batch:
    return settle(Batch.unpack(buffer, SHAPE), before, chains, PAGE)


@jax.jit
def _caught_up(buffer: Any, before: NewTokens) -> Batch:
    return catch_up(Batch.unpack(buffer, ROUND), before)


def packed(trees: list[Tree], shape: BatchShape = SHAPE) -> np.ndarray:
    return pack(trees, [shape], BatchBuffers([shape]), PAGE).buffer


def drafts(rng: np.random.Generator, committed: int, pages: np.ndarray) -> Tree:
    """A known token and a random tree of up to nine drafts, of few different tokens: some are accepted."""
    parent, depth = [-1], [0]

    def grow(node: int) -> None:
        for token in rng.permutation(3)[: rng.integers(0, 3)]:
            if len(parent) < 10 and depth[node] < DEPTH:
                parent.append(node)
                depth.append(depth[node] + 1)
                tokens.append(int(token))
                grow(len(parent) - 1)

    tokens = [int(rng.integers(0, 3))]
    grow(0)
    n = len(parent)
    subtree = [sum(i <= j < n and _below(parent, i, j) for j in range(n)) for i in range(n)]
    known = np.zeros(n, np.int32)
    known[0] = 1
    token, depths, sizes, parents = (np.asarray(x, np.int32) for x in (tokens, depth, subtree, parent))
    return Tree(token, depths, sizes, known, committed, pages, np.arange(n), SAMPLING, parent=parents)


def _below(parent: list[int], top: int, node: int) -> bool:
    while node > top:
        node = parent[node]
    return node == top


def walked(tree: Tree, sampled: np.ndarray) -> list[int]:
    """The new tokens of a tree, node by node; `sampled`: of its logit rows."""
    node = len(tree.token) - 1 if tree.known.all() else 0
    found = [int(sampled[-1 if tree.known.all() else 0])]
    parents = tree.parents()
    while True:
        fits = [i for i in range(len(tree.token)) if parents[i] == node and not tree.known[i]]
        following = [i for i in fits if tree.token[i] == found[-1]]
        if not following:
            return found
        node = following[0]
        found.append(int(sampled[node]))


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_step_that_follows_is_packed_as_if_the_results_were_known(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages = rng.permutation(200)[:80].reshape(5, 16).astype(np.int32)
    trees = []
    for own in pages[: rng.integers(1, 6)]:
        committed = int(rng.integers(0, 30))
        if rng.random() < 0.7:
            trees.append(drafts(rng, committed, own))
        else:  # a prompt, of which all logits are read now and then
            count = int(rng.integers(1, 6))
            rows = count if rng.random() < 0.5 else 1
            trees.append(Tree.chain(rng.integers(0, 9, count).tolist(), committed, own, SAMPLING, rows))
    sampled = rng.integers(0, 3, SHAPE.rows).astype(np.int32)
    rows = np.cumsum([0, *(len(t.rows) for t in trees)])
    new = [walked(t, sampled[a:b]) for t, a, b in zip(trees, rows, rows[1:], strict=False)]
    before = _given(packed(trees), sampled)
    for i, expected in enumerate(new):
        assert np.asarray(before.length)[i] == len(expected)
        assert np.asarray(before.token)[i, : len(expected)].tolist() == expected
    assert not np.asarray(before.length)[len(new) :].any()

    chains = rng.integers(10, 99, (MOST, DEPTH)).astype(np.int32)
    known, unknown, caught, catching = [], [], [], []
    for i, at in enumerate(rng.permutation(len(trees)).tolist()):
        tree, levels = trees[at], int(rng.integers(0, 4))
        first = tree.committed + int(tree.known.sum())  # position of the first new token
        names = [FIRST_DRAFT - (i * DEPTH + j) for j in range(levels)]
        known.append(_chain([new[at][-1], *chains[i, :levels]], first + len(new[at]) - 1, tree.pages))
        unknown.append(_chain([UNKNOWN, *names], first, tree.pages, at))
        caught.append([7, *new[at]])
        room = int(tree.depth.max()) + 1
        chain = Tree.chain([7, *range(-1, -1 - room, -1)], first - 1, tree.pages, SAMPLING, after=at)
        catching.append(replace(chain, rows=np.asarray([1])))
    wanted, got = Batch.unpack(jnp.asarray(packed(known)), SHAPE), _settled(packed(unknown), before, chains)
    for name in set(Batch._fields) - {"after"}:
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), name)

    round_batch = _caught_up(packed(catching, ROUND), before)
    node = 0
    for i, (chain, tokens) in enumerate(zip(catching, caught, strict=True)):
        part = slice(node, node + len(tokens))
        assert np.asarray(round_batch.token)[part].tolist() == tokens
        assert np.asarray(round_batch.known)[part].all()
        assert not np.asarray(round_batch.known)[node + len(tokens) : node + len(chain.token)].any()
        assert np.asarray(round_batch.logit_node)[i] == node + len(tokens) - 1
        node += len(chain.token)


def _chain(tokens: list[int], committed: int, pages: np.ndarray, after: int = -1) -> Tree:
    """A root and drafts below one another."""
    n = len(tokens)
    index = np.arange(n, dtype=np.int32)
    known = (index == 0).astype(np.int32)
    return Tree(
        np.asarray(tokens, np.int32), index, n - index, known, committed, pages, index, SAMPLING, parent=index - 1,
        after=after,
    )  # fmt: skip
