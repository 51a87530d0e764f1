"""The CPU kernel's attention against float64, and bit for bit against plain decoding, in every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.builds import BUILDS, use
from jaxspec.kernels import cpu

KV_HEADS, DIM, PAGE, PAGES, LAYERS = 2, 32, 32, 128, 2
#: Query heads per key-value head.
GROUPS = (1, 2, 3, 5, 7)


@pytest.fixture(scope="module", autouse=True, params=[name for name in BUILDS if name != "tiles"])
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from use(request.param)


class Trees:
    """Chains over committed pages, and a pool of random keys and values with NaN where nothing is committed.

    `nodes`, `committed`: of each tree. Page tables are disjoint. groups: query heads per key-value head.
    """

    def __init__(self, nodes: list[int], committed: list[int], dtype: str, seed: int, groups: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.nodes, self.committed, self.groups, tokens = nodes, committed, groups, sum(nodes)
        self.q, self.k, self.v = (
            rng.normal(size=(tokens, heads, DIM)).astype(np.float32)
            for heads in (KV_HEADS * groups, KV_HEADS, KV_HEADS)
        )
        width = max(1, *(-(-c // PAGE) for c in committed))
        order = rng.permutation(PAGES)
        self.table = np.zeros((len(nodes), width), np.int32)
        keys = np.full((LAYERS, PAGES, KV_HEADS, DIM, PAGE), np.nan, np.float32)
        values = np.full((LAYERS, PAGES, KV_HEADS, PAGE, DIM), np.nan, np.float32)
        for r, count in enumerate(committed):
            for i in range(-(-count // PAGE)):
                page, used = order[r * width + i], min(PAGE, count - i * PAGE)
                self.table[r, i] = page
                keys[:, page, :, :, :used] = rng.normal(size=(LAYERS, KV_HEADS, DIM, used))
                values[:, page, :, :used] = rng.normal(size=(LAYERS, KV_HEADS, used, DIM))
        self.keys, self.values = jnp.asarray(keys, dtype), jnp.asarray(values, dtype)

    def kernel(self, window: int = 0, cap: float | None = None) -> np.ndarray:
        nodes, committed = np.asarray(self.nodes), np.asarray(self.committed)
        first = np.cumsum(nodes) - nodes
        depth = np.concatenate([np.arange(n) for n in nodes])
        position = np.repeat(committed, nodes) + depth
        subtree = np.repeat(nodes, nodes) - depth
        q, k, v = map(jnp.asarray, (self.q, self.k, self.v))
        position, subtree, first, nodes, committed, table = map(
            jnp.asarray, (position, subtree, first, nodes, committed, self.table)
        )
        out, lse = cpu.attention(
            q, k, v, self.keys, self.values, jnp.int32(1), jnp.int32(window), position, subtree, first, nodes,
            committed, table, cap=cap,
        )  # fmt: skip
        assert np.isfinite(lse).all()
        return np.asarray(out)

    def exact(self, window: int = 0, cap: float | None = None) -> np.ndarray:
        """In float64, node by node."""
        out, t = np.zeros(self.q.shape), 0
        for r, (count, committed) in enumerate(zip(self.nodes, self.committed, strict=True)):
            pages = self.table[r, : -(-committed // PAGE)]
            keys = np.asarray(self.keys[1, pages], np.float64).transpose(0, 3, 1, 2).reshape(-1, KV_HEADS, DIM)
            values = np.asarray(self.values[1, pages], np.float64).swapaxes(1, 2).reshape(-1, KV_HEADS, DIM)
            begin = t
            for _ in range(count):
                k = np.concatenate([keys[:committed], self.k[begin : t + 1]])[-window:]
                v = np.concatenate([values[:committed], self.v[begin : t + 1]])[-window:]
                for h in range(KV_HEADS * self.groups):
                    scores = k[:, h // self.groups] @ self.q[t, h].astype(np.float64) / np.sqrt(DIM)
                    if cap is not None:
                        scores = cap * np.tanh(scores / cap)
                    weights = np.exp(scores - scores.max())
                    out[t, h] = weights @ v[:, h // self.groups] / weights.sum()
                t += 1
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_as_in_float64(dtype: str, data: Any) -> None:
    count = data.draw(st.integers(1, 3))
    nodes = data.draw(st.lists(st.sampled_from((1, 2, 7, 16, 17, 40, 70)), min_size=count, max_size=count))
    committed = data.draw(st.lists(st.sampled_from((0, 5, 255, 256, 257, 700, 1300)), min_size=count, max_size=count))
    window = data.draw(st.sampled_from((0, 0, 30, 300)))
    trees = Trees(nodes, committed, dtype, data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from(GROUPS)))
    cap = data.draw(st.sampled_from((None, None, 1.5, 50.0)))
    out = trees.kernel(window, cap)
    chex.assert_shape(out, trees.q.shape)
    np.testing.assert_allclose(out, trees.exact(window, cap), atol=3e-6)


def test_a_tree_does_not_depend_on_the_others() -> None:
    """Bit for bit, although its parts are computed by other threads in another order."""
    trees = Trees([1, 3, 70, 1], [1100, 600, 900, 20], "float32", 0)
    together, t = trees.kernel(), 0
    for r, count in enumerate(trees.nodes):
        alone = Trees([count], [trees.committed[r]], "float32", 0)
        alone.q, alone.k, alone.v = (x[t : t + count] for x in (trees.q, trees.k, trees.v))
        alone.keys, alone.values, alone.table = trees.keys, trees.values, trees.table[r : r + 1]
        np.testing.assert_array_equal(alone.kernel(), together[t : t + count])
        t += count


class Sequence:
    """A prompt's keys and values in pages, then a random tree of nodes on it, in preorder."""

    def __init__(self, committed: int, parents: list[int], page: int, seed: int, groups: int) -> None:
        rng = np.random.default_rng(seed)
        self.committed, self.parents, self.page = committed, parents, page
        nodes = len(parents)
        self.keys, self.values = rng.normal(size=(2, committed, KV_HEADS, DIM)).astype(np.float32)
        self.q = rng.normal(size=(nodes, KV_HEADS * groups, DIM)).astype(np.float32)
        self.k, self.v = rng.normal(size=(2, nodes, KV_HEADS, DIM)).astype(np.float32)
        self.depth = [0] * nodes
        self.subtree = np.ones(nodes, np.int32)
        for i, parent in enumerate(parents):
            self.depth[i] = self.depth[parent] + 1 if parent >= 0 else 0
        for i in reversed(range(nodes)):
            if parents[i] >= 0:
                self.subtree[parents[i]] += self.subtree[i]

    def path(self, node: int) -> list[int]:
        found = [node]
        while self.parents[found[0]] >= 0:
            found.insert(0, self.parents[found[0]])
        return found

    def run(
        self, nodes: list[int], before: list[int], subtree: np.ndarray, window: int, cap: float | None
    ) -> np.ndarray:
        """Outputs `[nodes, heads, DIM]` of `nodes`, with the nodes `before` in pages like the prompt."""
        keys, values = (np.concatenate([a, b[before]]) for a, b in ((self.keys, self.k), (self.values, self.v)))
        count, size = len(keys), self.page
        pages = -(-count // size)
        pool_k = np.full((1, pages + 1, KV_HEADS, DIM, size), np.nan, np.float32)
        pool_v = np.full((1, pages + 1, KV_HEADS, size, DIM), np.nan, np.float32)
        for i in range(pages):
            here = slice(i * size, (i + 1) * size)
            used = len(keys[here])
            pool_k[0, i, :, :, :used] = keys[here].transpose(1, 2, 0)
            pool_v[0, i, :, :used] = values[here].swapaxes(0, 1)
        position = np.array([self.committed + self.depth[n] for n in nodes])
        q, k, v = (jnp.asarray(x[nodes]) for x in (self.q, self.k, self.v))
        pool, table = (jnp.asarray(pool_k), jnp.asarray(pool_v)), jnp.arange(max(1, pages))[None]
        out, _ = cpu.attention(
            q, k, v, *pool, jnp.int32(0), jnp.int32(window), jnp.asarray(position), jnp.asarray(subtree),
            jnp.zeros(1), jnp.array([len(nodes)]), jnp.array([count]), table, cap=cap,
        )  # fmt: skip
        return np.asarray(out)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_node_has_the_bits_of_plain_decoding(data: Any) -> None:
    """Prompts in chunks and token trees: every node as if its path were in pages and it were the only node."""
    committed = data.draw(st.sampled_from((0, 1, 20, 31, 32, 33, 250, 256, 300, 511, 700)))
    nodes = data.draw(st.sampled_from((1, 2, 5, 16, 17, 40, 70, 300)))
    chain = nodes == 300 or data.draw(st.booleans())
    stack, parents = [0], [-1]
    for i in range(1, nodes):  # preorder: the parent is on the path to the last node
        parents.append(stack[-1] if chain else stack[data.draw(st.integers(0, len(stack) - 1))])
        stack = [*stack[: stack.index(parents[-1]) + 1], i]
    window = data.draw(st.sampled_from((0, 0, 7, 30, 300)))
    page = data.draw(st.sampled_from((16, 32, 64, 128)))
    cap = data.draw(st.sampled_from((None, None, 2.0)))
    groups = data.draw(st.sampled_from(GROUPS))
    sequence = Sequence(committed, parents, page, data.draw(st.integers(0, 2**32)), groups)
    together = sequence.run(list(range(nodes)), [], sequence.subtree, window, cap)
    for node in {0, nodes - 1, nodes // 2, nodes // 3, min(nodes - 1, 27)}:
        *before, last = sequence.path(node)
        alone = sequence.run([last], before, np.ones(1, np.int32), window, cap)
        np.testing.assert_array_equal(alone[0], together[node])
