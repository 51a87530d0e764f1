"""Attention of one step with XLA's own operations: committed KV and the step's own tokens, merged by log-sum-exp.

Every part yields a `Partial`: an unnormalised output with its running maximum and sum, so parts merge in any order
(SPIN §V-A, FlashDecoding). Committed pages of all requests form one list, read in blocks of pages; a block is scored
against every node of the step and masked, which costs a GPU little and keeps the shape free of the requests' lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache

#: Stands for minus infinity, but keeps exp(m - m) finite where nothing was attended to.
NEVER = -1e30
#: Positions read at once.
BLOCK = 512


class Earlier(NamedTuple):
    """Nodes of levels before, whose KV is in no pool yet. R requests, W nodes a level and request, S slots."""

    keys: jax.Array  # [layers, R, S, kv_heads, head_dim]
    values: jax.Array  # the same
    seen: jax.Array  # [R, W, S] bool: the slots of a node's ancestors


def over_earlier(q: jax.Array, earlier: Earlier, layer: jax.Array) -> Partial:
    """Attention of nodes over their ancestors. q `[K, T, G, D]` (scaled), T = R * W."""
    kv, t, g, d = q.shape
    r, w, _ = earlier.seen.shape
    scores = jnp.einsum("krwgd,rskd->krwgs", q.reshape(kv, r, w, g, d), earlier.keys[layer])
    mask = earlier.seen[None, :, :, None, :]
    scores = jnp.where(mask, scores, NEVER)
    peak = jnp.max(scores, -1)
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    out = jnp.einsum("krwgs,rskd->krwgd", weights, earlier.values[layer])
    return Partial(out.reshape(q.shape), peak.reshape(kv, t, g), jnp.sum(weights, -1).reshape(kv, t, g))


def block_pages(page_size: int) -> int:
    """Pages read at once."""
    return max(1, BLOCK // page_size)


class Partial(NamedTuple):
    """out `[..., D]` = Σ exp(score - peak) value; peak, total `[...]`."""

    out: jax.Array
    peak: jax.Array
    total: jax.Array


def merge(a: Partial, b: Partial) -> Partial:
    peak = jnp.maximum(a.peak, b.peak)
    x, y = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return Partial(a.out * x[..., None] + b.out * y[..., None], peak, a.total * x + b.total * y)


def _partial(scores: jax.Array, values: jax.Array, mask: jax.Array) -> Partial:
    """scores `[K, T, G, S]`, values `[S, K, D]`, mask `[T, S]` -> `[K, T, G]`; a row that sees nothing has total 0."""
    mask = mask[None, :, None, :]
    scores = jnp.where(mask, scores, NEVER)
    peak = jnp.max(scores, -1)
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    return Partial(jnp.einsum("ktgs,skd->ktgd", weights, values), peak, jnp.sum(weights, -1))


def within_batch(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """The T×T part. q `[K, T, G, D]` (scaled), k and v `[T, K, D]`, mask `[T, T]`."""
    return _partial(jnp.einsum("ktgd,skd->ktgs", q, k), v, mask)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: AnyKVCache, layer: jax.Array, batch: Batch, mask: jax.Array,
    window: int | jax.Array | None = None, earlier: Earlier | None = None,
) -> jax.Array:  # fmt: skip
    """All parts: `[T, heads, D]` from q `[T, heads, D]`, k and v `[T, K, D]`, mask `[T, T]` of ancestors."""
    (_, kv, d), heads = k.shape, q.shape[1]
    if window is not None:
        mask = mask & (batch.position[:, None] - batch.position[None, :] < window)
    q = q.reshape(-1, kv, heads // kv, d).transpose(1, 0, 2, 3) * d**-0.5
    part = merge(committed(q, pool, layer, batch, window), within_batch(q, k, v, mask))
    if earlier is not None:
        part = merge(part, over_earlier(q, earlier, layer))
    out = part.out / part.total[..., None]
    return out.transpose(1, 0, 2, 3).reshape(-1, heads, d).astype(v.dtype)


def committed(
    q: jax.Array, pool: AnyKVCache, layer: jax.Array, batch: Batch, window: int | jax.Array | None
) -> Partial:
    """The part over the pool. q `[K, T, G, D]`, scaled; `window` hides keys that many positions back or more."""
    page = pool.keys.shape[-1]
    size = block_pages(page)
    counts = -(-batch.committed // page)
    ends = jnp.cumsum(counts)

    def block(i: jax.Array, acc: Partial) -> Partial:
        place = i * size + jnp.arange(size)
        tree = jnp.searchsorted(ends, place, side="right")
        index = place - (ends - counts).at[tree].get(mode="clip")
        row = batch.table.at[tree, index].get(mode="clip")
        keys, values = pool.read(layer, row)  # [B, K, D, P] and [B, K, P, D]
        position = (index[:, None] * page + jnp.arange(page)).reshape(-1)
        live = position < jnp.repeat(batch.committed.at[tree].get(mode="fill", fill_value=0), page)
        mask = live & (batch.tree[:, None] == jnp.repeat(tree, page))
        if window is not None:
            mask &= batch.position[:, None] - position < window
        scores = jnp.einsum("ktgd,bkdp->ktgbp", q, keys).reshape(*q.shape[:3], -1)
        values = jnp.where(
            live[:, None, None], values.transpose(0, 2, 1, 3).reshape(size * page, *values.shape[1::2]), 0
        )
        return merge(acc, _partial(scores, values, mask))

    nothing = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], NEVER), jnp.zeros(q.shape[:3]))
    return lax.fori_loop(0, -(-ends[-1] // size), block, nothing)
