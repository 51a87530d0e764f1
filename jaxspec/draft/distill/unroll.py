"""Unrolled passes of a drafter over whole rows: what each position would draft at depth 1, 2, …

This is EAGLE-3's training-time test (Li et al. 2025, §3.2). Pass j at position p reads the drafter's output of pass
j - 1 at p - 1, as a draft at depth j + 1 does. It attends to what such a draft would find: the keys of pass 0 for
positions that the target has computed, and those of pass i for the i-th draft token after them.

A parallel drafter (P-EAGLE, arXiv 2602.01469) drafts all depths at once, so from depth 2 on a position reads neither
its token nor an output: its input is the same everywhere, and only its place and the keys before it differ. That input
is the fixed embedding of one token, through `fuse`; P-EAGLE learns one.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.models.drafter import DraftDecoder, previous
from jaxspec.models.layers import softcap

#: Keys and values of one layer in one pass, `[L, kv_heads, head_dim]` each.
_KV = tuple[jax.Array, jax.Array]
#: The token whose embedding stands for those that a parallel drafter does not know.
_MASK = 0


def unroll(
    model: DraftDecoder, tokens: jax.Array, features: jax.Array, passes: int, parallel: bool = False
) -> jax.Array:
    """The drafter's outputs `[passes, L, hidden]` of one row `tokens [L]`, `features [L, TAPS * hidden]` the target's.

    A plain drafter's passes differ in nothing, unless it is `parallel`.
    """
    c, positions = model.config, jnp.arange(tokens.shape[0])
    rope = model.rope(positions)
    kept: list[list[_KV]] = [[] for _ in model.layers]  # per layer, of the passes so far
    condition, outputs = model.condition(features), []
    for depth in range(passes):
        if parallel and depth == 1:
            tokens = jnp.full_like(tokens, _MASK)
        if parallel and depth:
            condition = jnp.zeros_like(condition)
        x = model.embed(tokens, positions, previous(condition))
        for i, (layer, earlier) in enumerate(zip(model.layers, kept, strict=True)):
            x = layer(x, rope, partial(_attend, c.attention_softcap, earlier), c.rope_of(i))
        condition = model.finish(x)
        outputs.append(condition)
    return jnp.stack(outputs)


def _attend(cap: float | None, earlier: list[_KV], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of the next pass, `q [L, heads, head_dim]` -> the same shape. Appends `k` and `v` to `earlier`. `cap`:
    softcap of the scores."""
    earlier.append((k, v))
    length, heads, dim = q.shape
    depth = len(earlier) - 1
    q = q.reshape(length, k.shape[1], -1, dim) * dim**-0.5
    first_k, first_v = earlier[0]
    at = jnp.arange(length)
    committed = softcap(jnp.einsum("tkgd,skd->tkgs", q, first_k), cap)
    seen = (at <= at[:, None] - depth)[:, None, None]
    scores = [jnp.where(seen, committed, -jnp.inf)]
    drafted = [(_moved(k, depth - i), _moved(v, depth - i)) for i, (k, v) in enumerate(earlier)][1:]
    for i, (key, _) in enumerate(drafted, 1):
        real = (at >= depth - i)[:, None, None]
        scores.append(jnp.where(real, softcap(jnp.einsum("tkgd,tkd->tkg", q, key), cap), -jnp.inf)[..., None])
    shares = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
    out = jnp.einsum("tkgs,skd->tkgd", shares[..., :length], first_v)
    for i, (_, value) in enumerate(drafted):
        out += shares[..., length + i, None] * value[:, :, None]
    return out.reshape(length, heads, dim)


def _moved(x: jax.Array, by: int) -> jax.Array:
    """Rows `[L, …]` moved to `by` positions later; zeros at the start."""
    return x if not by else jnp.concatenate([jnp.zeros_like(x[:by]), x[:-by]])
