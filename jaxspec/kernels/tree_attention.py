"""Tree attention on GPUs, in Pallas with its Triton back end.

One program computes a work item (`jaxspec.step.work_items`) of one key-value head: a tile of query rows over a range of
the request's pages, and over the tree's own nodes under the preorder mask. A second kernel merges the items of each
tile by their log-sum-exp. The rows of a tile share the keys and values that they read, so a group of query heads uses
tensor cores even when a request has one node.

Triton runs on every NVIDIA GPU since Ampere, and its kernels run in an interpreter and compile without a GPU. JAX 0.11
deprecates this back end, hence `jax<0.13` for GPUs. Pallas' other one, Mosaic GPU, needs Hopper and cannot interpret
its matrix product yet. Its likely successor is the package jax_triton, for which these kernels need little change.
`attend` is the only function that a successor has to provide.

Dimensions: T nodes, H query heads, K key-value heads, G = H / K, D head_dim, P page_size, W items, N tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int32

from jaxspec.step import work_items
from jaxspec.step.attention import NEVER, Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.work_items import WorkItems

#: Own nodes, or slots of earlier levels, that are scored at once. Tensor cores take 16 at least.
_BLOCK = 32
_LOG2E = 1.4426950408889634

#: Unnormalised output [rows, D] float32, maximum score and sum of weights [rows] float32, scores in powers of two.
_Sums = tuple[Array, Array, Array]


class _Nodes(NamedTuple):
    """The fields of `Batch` that the kernel reads."""

    position: Any
    subtree: Any
    first: Any
    nodes: Any
    committed: Any
    table: Any


class _Pool(NamedTuple):
    """Keys `[layers, pages, K, D, P]` and values `[layers, pages, K, P, D]`; if quantised, also the scales and zero
    points of keys and of values (`Int8KVCache.channels`)."""

    keys: Any
    values: Any
    channels: tuple[Any, ...]


def attend(
    qkv: Float[Array, "T H+2*K D"],
    kv_heads: int,
    kv_cache: AnyKVCache,
    layer: Int32[Array, ""],
    batch: Batch,
    items: WorkItems,
    rows: int,
    window: int | None = None,
    earlier: Earlier | None = None,
    cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Attention of every node to its request's committed positions and to its ancestors, as `step.attention.attend`.

    qkv: queries, keys and values of the nodes, along the axis of heads; items: `work_items.plan` for tiles of `rows`
    rows; window: sliding window in positions; earlier: ancestors outside batch and pool; cap: softcap of the
    scores; interpret: run on the CPU, for tests. Sums are in float32. Outputs of padding nodes are undefined.
    """
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    group, count, tiles = heads // kv_heads, items.tree.shape[0], items.items.shape[0]
    nodes = _Nodes(*(getattr(batch, name) for name in _Nodes._fields))
    pool = _Pool(kv_cache.keys, kv_cache.values, kv_cache.channels)
    if earlier is not None:
        earlier = earlier._replace(seen=earlier.seen.astype(jnp.int32))
    parts = work_items.most_rows(tokens, group, batch.table.shape[1], kv_cache.keys.shape[-1])
    kernel = partial(_one_item, rows=rows, group=group, window=window, scale=dim**-0.5, cap=cap)
    out, lse = pl.pallas_call(
        kernel, grid=(count, kv_heads), interpret=interpret, name="tree_attention",
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        out_shape=(
            jax.ShapeDtypeStruct((parts, kv_heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, kv_heads), jnp.float32),
        ),
    )(qkv, pool, layer.reshape(1), nodes, items, earlier)  # fmt: skip
    return pl.pallas_call(
        partial(_merge, rows=rows, group=group), grid=(tiles, kv_heads), interpret=interpret,
        name="merge_attention", compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, dim), qkv.dtype),
    )(out, lse, items)  # fmt: skip


def _one_item(
    qkv_ref: Any, pool: _Pool, layer_ref: Any, batch: _Nodes, items: WorkItems,
    earlier: Earlier | None, out_ref: Any, lse_ref: Any, *, rows: int, group: int, window: int | None, scale: float,
    cap: float | None,
) -> None:  # fmt: skip
    """The normalised output and the log-sum-exp of one item and key-value head."""
    item, head, kv_heads = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tree = items.tree[item]

    @pl.when(tree >= 0)
    def _() -> None:
        layer, columns = layer_ref[0], jnp.arange(qkv_ref.shape[2])
        page_size = pool.keys.shape[4]
        first, nodes, committed = batch.first[tree], batch.nodes[tree], batch.committed[tree]
        begin, end, full = items.begin[item], items.end[item], committed // page_size
        row = items.row[item] + jnp.arange(rows)
        live = row < nodes * group
        node = first + jnp.minimum(row // group, nodes - 1)
        place = node[:, None], (head * group + row % group)[:, None], columns[None, :]
        q = plgpu.load(qkv_ref.at[place], mask=live[:, None], other=0.0)
        position = None if window is None else batch.position[node]

        def add(sums: _Sums, keys: Array, values: Array, seen: Array | None) -> _Sums:
            """The sums with keys `[D, S]` and values `[S, D]`, where `seen [rows, S]`; None: all are."""
            out, peak, total = sums
            scores = product(q, keys) * (scale * (_LOG2E if cap is None else 1 / cap))
            if cap is not None:
                scores = jnp.tanh(scores) * (cap * _LOG2E)
            if seen is not None:
                scores = jnp.where(seen, scores, NEVER)
            top = jnp.maximum(peak, jnp.max(scores, 1))
            weights = jnp.exp2(scores - top[:, None])
            if seen is not None:
                weights = jnp.where(seen, weights, 0.0)
            fade = jnp.exp2(peak - top)
            out = out * fade[:, None] + product(weights.astype(values.dtype), values)
            return out, top, total * fade + jnp.sum(weights, 1)

        def over_page(i: Array, sums: _Sums, filled: bool) -> _Sums:
            page = batch.table[tree, i]
            keys, values = _page(pool, layer, page, head, q.dtype)
            there = i * page_size + jnp.arange(page_size)
            seen = None if filled else jnp.broadcast_to((there < committed)[None, :], (rows, page_size))
            if not filled:  # unwritten positions may hold NaN, which a zero weight does not remove
                values = jnp.where((there < committed)[:, None], values, 0)
            if position is not None:
                near = position[:, None] - there[None, :] < window
                seen = near if seen is None else seen & near
            return add(sums, keys, values, seen)

        def over_nodes(i: Array, sums: _Sums) -> _Sums:
            """A block of the tree's own nodes."""
            index = i * _BLOCK + jnp.arange(_BLOCK)
            there, at = index < nodes, first + jnp.minimum(index, nodes - 1)
            key = kv_heads * group + head
            keys = plgpu.load(qkv_ref.at[at[:, None], key, columns[None, :]], mask=there[:, None], other=0.0)
            values = plgpu.load(
                qkv_ref.at[at[:, None], key + kv_heads, columns[None, :]], mask=there[:, None], other=0.0
            )
            seen = (at[None, :] <= node[:, None]) & (node[:, None] < (at + batch.subtree[at])[None, :])
            seen &= there[None, :]
            if position is not None:
                seen &= position[:, None] - batch.position[at][None, :] < window
            return add(sums, keys.T, values, seen)

        sums = (
            jnp.zeros((rows, qkv_ref.shape[2]), jnp.float32), jnp.full(rows, NEVER, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )  # fmt: skip
        if window is not None:  # pages that no node of the tree sees; a node's position is at least `committed`
            begin = jnp.maximum(begin, (committed - window + 1) // page_size)
        sums = lax.fori_loop(begin, jnp.minimum(end, full), partial(over_page, filled=True), sums)
        # The request's last page, if it is not full: the last one of this item, or none.
        sums = lax.fori_loop(jnp.maximum(begin, full), end, partial(over_page, filled=False), sums)
        # In preorder no node after the tile's last one is an ancestor.
        last = jnp.minimum((items.row[item] + rows - 1) // group + 1, nodes)
        blocks = jnp.where(items.own[item] > 0, pl.cdiv(last, _BLOCK), 0)
        sums = lax.fori_loop(0, blocks, over_nodes, sums)
        if earlier is not None:
            sums = _over_earlier(add, sums, earlier, layer, tree, head, items.own[item], rows)
        out, peak, total = sums
        some = total > 0
        total = jnp.where(some, total, 1.0)
        into = items.place[item] + jnp.arange(rows)
        plgpu.store(out_ref.at[into[:, None], head, columns[None, :]], out / total[:, None], mask=live[:, None])
        plgpu.store(lse_ref.at[into, head], jnp.where(some, peak + jnp.log2(total), NEVER), mask=live)


def product(a: Array, b: Array) -> Array:
    """`[M, X]` times `[X, N]` in float32, in a kernel; the factors are rounded to TF32 nowhere."""
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precise, preferred_element_type=jnp.float32)


def _page(pool: _Pool, layer: Array, page: Array, head: Array, dtype: Any) -> tuple[Array, Array]:
    """Keys `[D, P]` and values `[P, D]` of a page and key-value head."""
    at = layer, page, head
    keys, values = pool.keys[at], pool.values[at]
    if not pool.channels:
        return keys, values
    key_scale, key_zero, value_scale, value_zero = (channel[at].astype(jnp.float32) for channel in pool.channels)
    return (
        ((keys.astype(jnp.float32) - key_zero[:, None]) * key_scale[:, None]).astype(dtype),
        ((values.astype(jnp.float32) - value_zero[None, :]) * value_scale[None, :]).astype(dtype),
    )


def _over_earlier(
    add: Callable[[_Sums, Array, Array, Array], _Sums], sums: _Sums, earlier: Any, layer: Array, tree: Array,
    head: Array, own: Array, rows: int,
) -> _Sums:  # fmt: skip
    """Ancestors of earlier draft levels: every node is a tree, W of them a request."""
    width, slots = earlier.seen.shape[1:]
    dim = earlier.keys.shape[4]
    request = tree // width

    def over_slots(i: Array, sums: _Sums) -> _Sums:
        slot = i * _BLOCK + jnp.arange(_BLOCK)
        there = slot < slots
        at = layer, request, jnp.minimum(slot, slots - 1)[:, None], head, jnp.arange(dim)[None, :]
        keys = plgpu.load(earlier.keys.at[at], mask=there[:, None], other=0.0)
        values = plgpu.load(earlier.values.at[at], mask=there[:, None], other=0.0)
        seen = plgpu.load(earlier.seen.at[request, tree % width, jnp.minimum(slot, slots - 1)], mask=there, other=0)
        return add(sums, keys.T, values, jnp.broadcast_to(seen[None, :] > 0, (rows, _BLOCK)))

    # Triton wants both bounds in one type, and would take a constant for 64 bits.
    blocks = jnp.where(own > 0, jnp.int32(pl.cdiv(slots, _BLOCK)), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), blocks, over_slots, sums)


def _merge(out_ref: Any, lse_ref: Any, items: WorkItems, into_ref: Any, *, rows: int, group: int) -> None:
    """The output of one tile and key-value head, from those of its items."""
    tile, head = pl.program_id(0), pl.program_id(1)
    count = items.items[tile]

    @pl.when(count > 0)
    def _() -> None:
        first, columns = items.first_item[tile], jnp.arange(out_ref.shape[2])
        live = jnp.arange(rows) < items.rows[tile]

        def add(i: Array, sums: _Sums) -> _Sums:
            out, peak, total = sums
            at = items.place[first + i] + jnp.arange(rows)
            lse = plgpu.load(lse_ref.at[at, head], mask=live, other=NEVER)
            part = plgpu.load(out_ref.at[at[:, None], head, columns[None, :]], mask=live[:, None], other=0.0)
            top = jnp.maximum(peak, lse)
            fade, weight = jnp.exp2(peak - top), jnp.exp2(lse - top)
            return out * fade[:, None] + part * weight[:, None], top, total * fade + weight

        sums = (
            jnp.zeros((rows, out_ref.shape[2]), jnp.float32), jnp.full(rows, NEVER, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )  # fmt: skip
        out, _, total = lax.fori_loop(0, count, add, sums)
        row = items.first_row[tile] + jnp.arange(rows)
        place = (row // group)[:, None], (head * group + row % group)[:, None], columns[None, :]
        out = out / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(into_ref.at[place], out.astype(into_ref.dtype), mask=live[:, None])
