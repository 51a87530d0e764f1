"""Attention of one step: committed KV by work items, the step's own tokens under the tree mask, merged by log-sum-exp.

Every part yields a `Partial`: an unnormalised output with its running maximum and sum, so parts merge in any order
(SPIN §V-A, FlashDecoding). Committed KV is read in two ways, chosen by the host for each segment of the pool:

* in place: one batched product over a whole segment, each row with the tile of the one request that reads it. Unread
  rows are padding. This is the fast way on CPU when a good part of a segment is in use.
* by item: a loop over (row, nodes low … high) with a dynamic trip count, so what is not there costs nothing. For rows
  of a sparsely used segment, rows that several requests share (one item serves all of them) and prefill chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.step.batch import ITEM_TILE, Batch, BatchShape

#: Stands for minus infinity, but keeps exp(m - m) finite where nothing was attended to.
NEVER = -1e30


class Partial(NamedTuple):
    """out `[..., D]` = Σ exp(score - peak) value; peak, total `[...]`."""

    out: jax.Array
    peak: jax.Array
    total: jax.Array


def merge(a: Partial, b: Partial) -> Partial:
    """Both parts over one peak."""
    peak = jnp.maximum(a.peak, b.peak)
    scale = jnp.exp(b.peak - peak)
    return _add(a, peak, b.out * scale[..., None], b.total * scale)


def _add(acc: Partial, peak: jax.Array, out: jax.Array, total: jax.Array) -> Partial:
    """`acc` and a part whose weights are already relative to the common `peak`."""
    scale = jnp.exp(acc.peak - peak)
    return Partial(acc.out * scale[..., None] + out, peak, acc.total * scale + total)


def _softmax_partial(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, peak and total over the last axis; a fully masked row has total 0."""
    scores = jnp.where(mask, scores, NEVER)
    peak = jnp.max(scores, -1)
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    return weights, peak, jnp.sum(weights, -1)


def within_batch(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """The T×T part. q `[K, T, G, D]` (scaled), k and v `[T, K, D]`, mask `[T, T]`."""
    scores = jnp.einsum("ktgd,skd->ktgs", q, k)
    weights, peak, total = _softmax_partial(scores, mask[None, :, None, :])
    return Partial(jnp.einsum("ktgs,skd->ktgd", weights, v), peak, total)


def _by_node(x: jax.Array, kv: int, g: int) -> jax.Array:
    """`[R, K, Q*G, ...]` of tiles -> `[K, R*Q, G, ...]` of their nodes."""
    rest = x.shape[3:]
    return jnp.moveaxis(x, 1, 0).reshape(kv, -1, g, *rest)


def _nothing(shape: tuple[int, ...], dim: int) -> Partial:
    return Partial(jnp.zeros((*shape, dim)), jnp.full(shape, NEVER), jnp.zeros(shape))


class _Segment(NamedTuple):
    """What all layers need to read one segment in place. N rows, R tiles, Q nodes a tile, P positions a page."""

    used: jax.Array  # bool
    reader: jax.Array  # [N] tile of each row
    reads: jax.Array  # [R, N] float32, 1 where the tile reads the row
    bias: jax.Array  # [N, Q or 1, P] 0 where visible, NEVER elsewhere


class Committed:
    """Attention of a batch against the pool; one object a trace, called once a layer.

    `window` (static) hides keys that are that many positions back or more.
    """

    def __init__(self, shape: BatchShape, batch: Batch, page_size: int, window: int | None):
        self.shape, self.batch, self.window = shape, batch, window
        self.lane = jnp.arange(page_size)
        starts = np.cumsum([0, *shape.segments])
        self.segments = [self._segment(s, int(starts[s]), int(starts[s + 1])) for s in range(len(shape.segments))]

    def _segment(self, s: int, low: int, high: int) -> _Segment:
        b = self.batch
        reader, valid, start = (f[low:high] for f in (b.row_reader, b.row_valid, b.row_start))
        position = jnp.zeros((high - low, 1), jnp.int32)
        if self.window is not None:
            nodes = b.tile_token.at[reader].get(mode="clip")
            position = b.position.at[nodes].get(mode="clip")  # [N, Q]
        bias = jnp.where(self._visible(valid[:, None], start[:, None], position), 0.0, NEVER)
        reads = (reader[None, :] == jnp.arange(self.shape.tiles)[:, None]).astype(jnp.float32)
        return _Segment(b.segment_in_place[s] > 0, reader, reads, bias)

    def __call__(self, q: jax.Array, layer: tuple[tuple[jax.Array, jax.Array], ...]) -> Partial:
        """q `[K, T, G, D]`, scaled; layer: (keys, values) of each segment -> Partial `[K, T, G]`."""
        b, (kv, _, g, d) = self.batch, q.shape
        tiles = b.tile_token.reshape(-1)
        queries = q.at[:, tiles].get(mode="fill", fill_value=0).reshape(kv, self.shape.tiles, -1, d)
        tiled = _nothing((self.shape.tiles, kv, queries.shape[2]), d)
        for segment, (keys, values) in zip(self.segments, layer, strict=True):
            tiled = self._in_place(segment, tiled, queries, keys, values)
        flat = Partial(*(_by_node(x, kv, g) for x in tiled))
        fills = (0.0, NEVER, 0.0)
        own = Partial(*(x.at[:, b.token_tile].get(mode="fill", fill_value=f) for x, f in zip(flat, fills, strict=True)))
        return self._by_item(own, q, layer)

    def _visible(self, valid: jax.Array, start: jax.Array, position: jax.Array) -> jax.Array:
        """Mask over a row's positions `[..., page]`: committed, and inside the window of the query at `position`."""
        mask = self.lane < valid[..., None]
        if self.window is not None:
            mask &= start[..., None] + self.lane > position[..., None] - self.window
        return mask

    def _in_place(self, seg: _Segment, acc: Partial, queries: jax.Array, keys: jax.Array, values: jax.Array) -> Partial:
        """Merge a segment, read whole, into the tiles' Partial `[R, K, Q*G]`; skipped if nothing reads it.

        Few and plain operations: each is compiled for every layer, segment and shape. A row that sees nothing needs no
        care, its peak of NEVER makes its weight vanish in a merge, and no tile reads a row that is not in use.
        """
        width = acc.peak.shape[-1]

        def read(acc: Partial) -> Partial:
            rows = jnp.moveaxis(queries.at[:, seg.reader].get(mode="clip"), 0, 1)  # [N, K, Q*G, D]
            bias = jnp.repeat(seg.bias, width // seg.bias.shape[1], axis=1)[:, None]  # [N, 1, Q*G, P]
            scores = jnp.einsum("nkqd,nkdl->nkql", rows, keys) + bias
            peak = jnp.max(scores, -1)  # [N, K, Q*G]
            tops = jnp.where(seg.reads[:, :, None, None] > 0, peak[None], NEVER)
            top = jnp.maximum(acc.peak, jnp.max(tops, axis=1))  # [R, K, Q*G]
            # Kept out of the exponential's loop, which a gather inside would keep XLA from vectorising.
            row_top = lax.optimization_barrier(top.at[seg.reader].get(mode="clip"))
            weights = jnp.exp(scores - row_top[..., None])
            out = jnp.einsum("nkql,nkld->nkqd", weights, values)
            # Rows of one tile add up: a product with the 0/1 matrix of who reads what.
            out = (seg.reads @ out.reshape(out.shape[0], -1)).reshape(acc.out.shape)
            total = (seg.reads @ jnp.sum(weights, -1).reshape(peak.shape[0], -1)).reshape(top.shape)
            return _add(acc, top, out, total)

        return lax.cond(seg.used, read, lambda acc: acc, acc)

    def _by_item(self, acc: Partial, q: jax.Array, layer: tuple[tuple[jax.Array, jax.Array], ...]) -> Partial:
        """Merge all work items into the tokens' Partial `[K, T, G]`, one after another."""
        b, t = self.batch, q.shape[1]
        tile = min(t, ITEM_TILE)
        node = jnp.arange(tile)

        def fetch(arrays: tuple[jax.Array, jax.Array]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
            return lambda row: tuple(lax.dynamic_index_in_dim(x, row, 0, False) for x in arrays)

        def item(i: jax.Array, acc: Partial) -> Partial:
            k, v = lax.switch(b.item_segment[i], [fetch(arrays) for arrays in layer], b.item_row[i])
            low, high = b.item_low[i], b.item_high[i]
            first = low // tile * tile
            cut = (lambda x: x) if t <= tile else (lambda x: lax.dynamic_slice_in_dim(x, first, tile, 1))
            position = cut(b.position[None])[0]
            inside = (first + node >= low) & (first + node < high)
            mask = self._visible(jnp.where(inside, b.item_valid[i], 0), b.item_start[i], position)
            bias = jnp.where(mask, 0.0, NEVER)[None, :, None, :]
            scores = jnp.einsum("ktgd,kdl->ktgl", cut(q), k) + bias
            old = Partial(*(cut(x) for x in acc))
            top = jnp.maximum(old.peak, jnp.max(scores, -1))
            # Where nothing has been seen yet top is NEVER and this would be exp(0): the mask makes it 0.
            weights = jnp.where(mask[None, :, None, :], jnp.exp(scores - top[..., None]), 0.0)
            new = _add(old, top, jnp.einsum("ktgl,kld->ktgd", weights, v), jnp.sum(weights, -1))
            if t <= tile:
                return new
            return Partial(*(lax.dynamic_update_slice_in_dim(x, y, first, 1) for x, y in zip(acc, new, strict=True)))

        return lax.fori_loop(0, b.item_count[0], item, acc)
