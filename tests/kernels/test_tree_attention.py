"""The GPU's attention kernel against XLA's attention in float32, on random forests. Interpreted without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import forests
from jaxspec.kernels import tree_attention
from jaxspec.step import work_items
from jaxspec.step.attention import Earlier, attend
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache
from jaxspec.step.quantization import quantize
from jaxspec.step.tree import ancestors

pytestmark = pytest.mark.gpu

LAYERS, LAYER, SEQS = 2, 1, 4
#: Without a GPU the kernel is interpreted. A GPU's exponentials are approximate.
INTERPRET = jax.default_backend() != "gpu"
CLOSE = 3e-6 if INTERPRET else 2e-5


def packed(
    rng: np.random.Generator, nodes: list[int], committed: list[int], page: int, tokens: int, chain: bool = False
) -> tuple[Batch, int]:
    """A batch of random trees (or chains) over random pages, and the number of pages that they use."""
    shape = BatchShape(tokens, tokens, SEQS, max(1, -(-max(committed) // page)))
    _, batch = BatchBuffers([shape]).take(shape)
    free = iter(rng.permutation(sum(-(-c // page) for c in committed)).tolist())
    start = 0
    for tree, (count, done) in enumerate(zip(nodes, committed, strict=True)):
        parents = list(range(-1, count - 1)) if chain else forests.random_parents(rng, count)
        at = slice(start, start + count)
        batch.subtree[at], batch.position[at] = forests.subtree_sizes(parents), done + forests.depths(parents)
        batch.tree[at] = tree
        batch.first[tree], batch.nodes[tree], batch.committed[tree] = start, count, done
        pages = -(-done // page)
        batch.table[tree, :pages] = [next(free) for _ in range(pages)]
        start += count
    return Batch(*map(jnp.asarray, batch)), start


def drawn(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape).astype(np.float32))


def poisoned(cache: KVCache, batch: Batch) -> KVCache:
    """The cache with NaN in all positions that no request has committed."""
    page = cache.keys.shape[-1]
    there = np.zeros((cache.keys.shape[1], page), bool)
    for row, count in zip(np.asarray(batch.table), np.asarray(batch.committed), strict=True):
        for i in range(-(-int(count) // page)):
            there[row[i]] = np.arange(page) < count - i * page
    mask = jnp.asarray(there)[None, :, None]
    return cache._replace(
        keys=jnp.where(mask[..., None, :], cache.keys, jnp.nan),
        values=jnp.where(mask[..., None], cache.values, jnp.nan),
    )


def caches(rng: np.random.Generator, pages: int, kv: int, dim: int, page: int, batch: Batch) -> KVCache:
    shape = LAYERS, max(1, pages), kv
    return poisoned(
        KVCache(drawn(rng, *shape, dim, page), drawn(rng, *shape, page, dim), jnp.zeros((0, page, 1))), batch
    )


def both(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: AnyKVCache, batch: Batch, rows: int, window: int | None = None,
    earlier: Earlier | None = None, dtype: Any = jnp.float32, cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The kernel's output for inputs of this dtype, and XLA's for the same values in float32."""
    group, layer = q.shape[1] // k.shape[1], jnp.int32(LAYER)
    q, k, v, cache, earlier = jax.tree.map(
        lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, (q, k, v, cache, earlier)
    )
    items = work_items.plan(batch, group, rows, cache.keys.shape[-1])
    qkv = jnp.concatenate([q, k, v], 1)
    out = tree_attention.attend(qkv, k.shape[1], cache, layer, batch, items, rows, window, earlier, cap, INTERPRET)
    q, k, v, cache, earlier = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, (q, k, v, cache, earlier)
    )
    reference = attend(q, k, v, cache, layer, batch, ancestors(batch.subtree), window, earlier, cap)
    return np.asarray(out, np.float32), np.asarray(reference)


CASES = {
    # nodes, committed, heads, key-value heads, head_dim, page, rows, window, chains
    "one head a group": ([3, 1], [40, 0], 2, 2, 16, 16, 16, None, False),
    "groups of 4": ([7, 1, 5], [530, 17, 64], 8, 2, 16, 32, 16, None, False),
    "groups of 3": ([9, 4], [33, 1100], 9, 3, 64, 32, 32, None, False),
    "groups of 8": ([1, 20, 3, 2], [1, 200, 513, 31], 8, 1, 32, 16, 64, None, False),
    "window": ([6, 12], [700, 90], 4, 2, 16, 16, 16, 50, False),
    "prompts": ([40, 70], [64, 0], 4, 2, 32, 16, 32, None, True),
    "window, prompts": ([80], [33], 4, 2, 16, 16, 16, 20, True),
}


@pytest.mark.parametrize(
    "name", [*list(CASES)[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[2:])]
)
def test_agrees_with_xla_in_float32(name: str) -> None:
    nodes, committed, heads, kv, dim, page, rows, window, chain = CASES[name]
    rng = np.random.default_rng(len(name))
    tokens = sum(nodes) + 3
    batch, real = packed(rng, nodes, committed, page, tokens, chain)
    cache = caches(rng, sum(-(-c // page) for c in committed), kv, dim, page, batch)
    out, reference = both(
        drawn(rng, tokens, heads, dim),
        drawn(rng, tokens, kv, dim),
        drawn(rng, tokens, kv, dim),
        cache,
        batch,
        rows,
        window,
        cap=2.0 if name == "groups of 4" else None,
    )
    np.testing.assert_allclose(out[:real], reference[:real], atol=CLOSE)


def test_bfloat16_is_rounded_in_the_output_alone() -> None:
    """Sums and weights are float32: the error is hardly larger than that of rounding the output."""
    rng = np.random.default_rng(3)
    batch, real = packed(rng, [5, 9], [300, 40], 32, 16)
    cache = caches(rng, 12, 2, 64, 32, batch)
    out, reference = both(
        drawn(rng, 16, 4, 64), drawn(rng, 16, 2, 64), drawn(rng, 16, 2, 64), cache, batch, 16, dtype=jnp.bfloat16
    )
    error = np.sqrt(np.mean((out - reference)[:real] ** 2) / np.mean(reference[:real] ** 2))
    assert error < 2.5e-3  # rounding alone: 1.7e-3


@pytest.mark.slow
def test_int8_pages_are_dequantised() -> None:
    rng = np.random.default_rng(4)
    batch, real = packed(rng, [5, 2], [70, 40], 32, 8)
    keys, values = drawn(rng, LAYERS, 5, 2, 16, 32), drawn(rng, LAYERS, 5, 2, 32, 16)
    k, v = quantize(keys, -1), quantize(values, -2)
    empty = jnp.zeros((LAYERS, 1, 2, 16, 32))
    cache = Int8KVCache(
        k.codes, v.codes, jnp.zeros((0, 32, 1)), k.scale, k.zero, v.scale, v.zero, empty, empty.swapaxes(-1, -2)
    )
    out, reference = both(drawn(rng, 8, 4, 16), drawn(rng, 8, 2, 16), drawn(rng, 8, 2, 16), cache, batch, 16)
    np.testing.assert_allclose(out[:real], reference[:real], atol=CLOSE)


def test_nodes_of_earlier_draft_levels() -> None:
    """Two requests of four nodes, each node a tree of its own, with ancestors in 40 slots."""
    rng, width, slots = np.random.default_rng(5), 4, 40
    shape = BatchShape(2 * width, 1, 2 * width, 3)
    _, batch = BatchBuffers([shape]).take(shape)
    index = np.arange(2 * width)
    batch.subtree[:], batch.tree[:], batch.first[:], batch.nodes[:] = 1, index, index, 1
    batch.committed[:], batch.position[:] = np.repeat([37, 5], width), np.repeat([40, 8], width)
    batch.table[:width], batch.table[width:] = [2, 0, 0], [1, 0, 0]
    batch.table[:width, 1], batch.table[:width, 2] = 3, 0
    placed = Batch(*map(jnp.asarray, batch))
    cache = caches(rng, 4, 2, 16, 16, placed)
    seen = jnp.asarray(rng.random((2, width, slots)) < 0.3)
    earlier = Earlier(drawn(rng, LAYERS, 2, slots, 2, 16), drawn(rng, LAYERS, 2, slots, 2, 16), seen)
    q, k, v = drawn(rng, 8, 4, 16), drawn(rng, 8, 2, 16), drawn(rng, 8, 2, 16)
    out, reference = both(q, k, v, cache, placed, 16, earlier=earlier)
    np.testing.assert_allclose(out, reference, atol=CLOSE)


@pytest.mark.slow
def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """Alone and next to others of any size, its output is the same to the last bit."""
    rng = np.random.default_rng(6)
    alone, real = packed(rng, [3], [1300], 16, 12)
    pages = -(-1300 // 16)
    cache = caches(rng, pages + 40, 2, 16, 16, alone._replace(committed=jnp.asarray([1300, 0, 0, 0])))
    q, k, v = drawn(rng, 12, 4, 16), drawn(rng, 12, 2, 16), drawn(rng, 12, 2, 16)
    want, _ = both(q, k, v, cache, alone, 16)
    crowd, _ = packed(rng, [2, 3, 6], [600, 1300, 40], 16, 12)
    table = np.asarray(crowd.table).copy()
    table[1, :pages] = np.asarray(alone.table)[0, :pages]
    table[0, : 600 // 16 + 1] = np.asarray(alone.table)[0, : 600 // 16 + 1]
    table[2] = 0
    crowd = crowd._replace(table=jnp.asarray(table), subtree=crowd.subtree.at[2:5].set(alone.subtree[:3]))
    crowd = crowd._replace(position=crowd.position.at[2:5].set(alone.position[:3]))
    place = jnp.asarray([9, 10, 0, 1, 2, *range(3, 10)])
    full = cache._replace(keys=jnp.nan_to_num(cache.keys), values=jnp.nan_to_num(cache.values))
    got, _ = both(q[place], k[place], v[place], full, crowd, 16)
    np.testing.assert_array_equal(got[2:5], want[:real])


def test_every_row_and_page_is_in_exactly_one_item() -> None:
    rng = np.random.default_rng(7)
    group, rows, page = 3, 16, 16
    for _ in range(20):
        nodes = rng.integers(1, 40, SEQS).tolist()
        committed = rng.choice([0, 1, 16, 511, 512, 513, 5000], SEQS).tolist()
        batch, _ = packed(rng, nodes, committed, page, 40 * SEQS)  # padded to one shape
        items = jax.tree.map(np.asarray, work_items.plan(batch, group, rows, page))
        of_tile = np.concatenate([np.arange(f, f + n) for f, n in zip(items.first_item, items.items, strict=True)])
        np.testing.assert_array_equal(of_tile, np.arange((items.tree >= 0).sum()))
        assert (items.tree[len(of_tile) :] == -1).all()
        live = np.minimum(rows, np.asarray(nodes)[items.tree[: len(of_tile)]] * group - items.row[: len(of_tile)])
        places = np.concatenate([np.arange(p, p + n) for p, n in zip(items.place[: len(of_tile)], live, strict=True)])
        np.testing.assert_array_equal(np.sort(places), np.arange(live.sum()))
        assert live.sum() <= work_items.most_rows(batch.token.shape[0], group, batch.table.shape[1], page)
        covered = np.concatenate([np.arange(f, f + n) for f, n in zip(items.first_row, items.rows, strict=True)])
        np.testing.assert_array_equal(covered, np.arange(sum(nodes) * group))
        for tree, (count, done) in enumerate(zip(nodes, committed, strict=True)):
            for row in range(0, count * group, rows):
                of = np.flatnonzero((items.tree == tree) & (items.row == row))
                read = np.concatenate([np.arange(items.begin[i], items.end[i]) for i in of])
                np.testing.assert_array_equal(read, np.arange(-(-done // page)))
                assert items.own[of].tolist() == [0] * (len(of) - 1) + [1]
