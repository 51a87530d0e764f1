"""Tree attention with XLA operations: over committed KV and over the step's own tokens, merged by log-sum-exp.

Every part yields a `Partial`: an unnormalised output with its running maximum and sum, so parts merge in any order
(SPIN §V-A, FlashDecoding). The committed pages of all requests form one list that is read in blocks. Each block is
scored against all nodes of the step and masked. That costs a GPU little and makes the shapes independent of the
requests' lengths.

Dimensions: T nodes, H query heads, K key-value heads, G query heads per key-value head, D head_dim, S keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from jaxspec.models.layers import softcap
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache

#: Used instead of -inf, so that exp(m - m) stays finite for rows that attend to nothing.
NEVER = -1e30
#: Positions read per block.
BLOCK = 512


class Earlier(NamedTuple):
    """KV of earlier draft levels, which is in no pool yet.

    R requests, W nodes per level and request, S slots for nodes of earlier levels.
    """

    keys: Float[Array, "layers R S K D"]
    values: Float[Array, "layers R S K D"]
    seen: Bool[Array, "R W S"]  # whether the slot holds an ancestor of the node


def over_earlier(
    q: Float[Array, "K T G D"], earlier: Earlier, layer: Int32[Array, ""], cap: float | None = None
) -> Partial:
    """Attention of nodes to their ancestors of earlier levels. q is scaled; T = R * W; cap: softcap of the scores."""
    kv, t, g, d = q.shape
    r, w, _ = earlier.seen.shape
    scores = softcap(jnp.einsum("krwgd,rskd->krwgs", q.reshape(kv, r, w, g, d), earlier.keys[layer]), cap)
    mask = earlier.seen[None, :, :, None, :]
    scores = jnp.where(mask, scores, NEVER)
    peak = jnp.max(scores, -1)
    weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
    out = jnp.einsum("krwgs,rskd->krwgd", weights, earlier.values[layer])
    return Partial(out.reshape(q.shape), peak.reshape(kv, t, g), jnp.sum(weights, -1).reshape(kv, t, g))


def block_pages(page_size: int) -> int:
    """Pages read per block."""
    return max(1, BLOCK // page_size)


class Partial(NamedTuple):
    """Softmax-weighted values before normalisation: out = Σ exp(score - peak) value, total = Σ exp(score - peak)."""

    out: Float[Array, "K T G D"]
    peak: Float[Array, "K T G"]
    total: Float[Array, "K T G"]


def merge(a: Partial, b: Partial) -> Partial:
    """Combine two disjoint sets of keys."""
    peak = jnp.maximum(a.peak, b.peak)
    x, y = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return Partial(a.out * x[..., None] + b.out * y[..., None], peak, a.total * x + b.total * y)


def _partial(scores: Float[Array, "K T G S"], values: Float[Array, "S K D"], mask: Bool[Array, "T S"]) -> Partial:
    """Online softmax over one set of keys. A row whose mask is all false has total 0."""
    visible = mask[None, :, None, :]
    scores = jnp.where(visible, scores, NEVER)
    peak = jnp.max(scores, -1)
    weights = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)
    return Partial(jnp.einsum("ktgs,skd->ktgd", weights, values), peak, jnp.sum(weights, -1))


def within_batch(
    q: Float[Array, "K T G D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], mask: Bool[Array, "T T"],
    cap: float | None = None,
) -> Partial:  # fmt: skip
    """Attention among the nodes of the step. q is scaled."""
    return _partial(softcap(jnp.einsum("ktgd,skd->ktgs", q, k), cap), v, mask)


def attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_cache: AnyKVCache,
    layer: Int32[Array, ""],
    batch: Batch,
    mask: Bool[Array, "T T"],
    window: int | Int32[Array, ""] | None = None,
    earlier: Earlier | None = None,
    cap: float | None = None,
) -> Float[Array, "T H D"]:
    """Attention of every node to its request's committed positions and to its ancestors.

    mask: from `tree.ancestors`; window: sliding window in positions; earlier: ancestors outside batch and pool; cap:
    softcap of the scores.
    """
    (_, kv, d), heads = k.shape, q.shape[1]
    if window is not None:
        mask = mask & (batch.position[:, None] - batch.position[None, :] < window)
    # Scores, weights and sums are float32, also for inputs of lower precision.
    q = q.astype(jnp.float32).reshape(-1, kv, heads // kv, d).transpose(1, 0, 2, 3) * d**-0.5
    part = merge(committed(q, kv_cache, layer, batch, window, cap), within_batch(q, k, v, mask, cap))
    if earlier is not None:
        part = merge(part, over_earlier(q, earlier, layer, cap))
    out = part.out / part.total[..., None]
    return out.transpose(1, 0, 2, 3).reshape(-1, heads, d).astype(v.dtype)


def committed(
    q: Float[Array, "K T G D"],
    kv_cache: AnyKVCache,
    layer: Int32[Array, ""],
    batch: Batch,
    window: int | Int32[Array, ""] | None,
    cap: float | None = None,
) -> Partial:
    """Attention to committed positions in the pool. q is scaled; keys `window` or more positions back are masked."""
    page = kv_cache.keys.shape[-1]
    size = block_pages(page)
    counts = -(-batch.committed // page)
    ends = jnp.cumsum(counts)

    def block(i: Int32[Array, ""], acc: Partial) -> Partial:
        place = i * size + jnp.arange(size)
        tree = jnp.searchsorted(ends, place, side="right")
        index = place - (ends - counts).at[tree].get(mode="clip")
        row = batch.table.at[tree, index].get(mode="clip")
        keys, values = kv_cache.read(layer, row)  # [B, K, D, P] and [B, K, P, D]
        position = (index[:, None] * page + jnp.arange(page)).reshape(-1)
        live = position < jnp.repeat(batch.committed.at[tree].get(mode="fill", fill_value=0), page)
        mask = live & (batch.tree[:, None] == jnp.repeat(tree, page))
        if window is not None:
            mask &= batch.position[:, None] - position < window
        scores = softcap(jnp.einsum("ktgd,bkdp->ktgbp", q, keys).reshape(*q.shape[:3], -1), cap)
        # Unwritten positions may hold NaN, which a zero weight does not remove.
        values = jnp.where(
            live[:, None, None], values.transpose(0, 2, 1, 3).reshape(size * page, *values.shape[1::2]), 0
        )
        return merge(acc, _partial(scores, values, mask))

    empty = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], NEVER), jnp.zeros(q.shape[:3]))
    return lax.fori_loop(0, -(-ends[-1] // size), block, empty)
