"""Building blocks of decoders: norms, products, activations, attention of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.config import DecoderConfig

#: Matrix product: (x [T, in], weight, out, layer index or None) -> [T, out] float32. `out` and the layer index are for
#: weights that are padded or stacked over layers.
Product = Callable[[jax.Array, jax.Array, int, jax.Array | None], jax.Array]

#: Embedding: (weight, tokens [T] int32, vocab, hidden) -> [T, hidden]. Tokens out of bounds are clipped.
Lookup = Callable[[jax.Array, jax.Array, int, int], jax.Array]
#: Norm over the last axis: (x [..., size], weight [size], epsilon, bias [size] or None) -> [..., size]: by root mean
#: square, with a bias by mean and variance.
Norm = Callable[[jax.Array, jax.Array, float, jax.Array | None], jax.Array]

#: Product with experts: (x [N, in] with rows by expert, weight, out, layer index or None, counts [experts] int32 of
#: rows) -> [N, out] float32.
Grouped = Callable[[jax.Array, jax.Array, int, jax.Array | None, jax.Array], jax.Array]


def norm(x: jax.Array, weight: jax.Array, eps: float, bias: jax.Array | None = None) -> jax.Array:
    """The `Norm` with XLA, computed in float32."""
    f = x.astype(jnp.float32)
    if bias is not None:
        f = f - jnp.mean(f, -1, keepdims=True)
    normed = (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)).astype(x.dtype) * weight
    return normed if bias is None else normed + bias


def linear(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None) -> jax.Array:
    """The `Product` with XLA, for plain weights: `x [T, in]` times `weight [in, out]`."""
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


def lookup(weight: jax.Array, tokens: jax.Array, vocab: int, hidden: int) -> jax.Array:
    """The `Lookup` with XLA, for a plain `weight [vocab, hidden]`."""
    return weight.at[tokens].get(mode="clip")


def grouped(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None, counts: jax.Array) -> jax.Array:
    """The `Grouped` product with XLA, for a plain `weight [experts, in, out]`."""
    return jax.lax.ragged_dot(x, weight, counts, preferred_element_type=jnp.float32)


def _whole(x: jax.Array, width: int | None = None) -> jax.Array:
    return x


class Operations(NamedTuple):
    """The operations of a decoder that kernels replace, and those that several devices do together."""

    product: Product = linear
    lookup: Lookup = lookup
    norm: Norm = norm
    grouped: Grouped = grouped
    #: Sums `x [T, out]` over devices, each of which has multiplied a part of the rows.
    total: Callable[[jax.Array], jax.Array] = _whole
    #: (x [T, local], width) -> `[T, width]`: the columns of all devices.
    gather: Callable[[jax.Array, int], jax.Array] = _whole


XLA = Operations()


#: Activations by name.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dense_attention(config: DecoderConfig, layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of one sequence in a layer, without a KV cache.

    `query [T, heads, head_dim]`, `key` and `value [T, kv_heads, head_dim]` -> `[T, heads, head_dim]`.
    """
    window, (length, heads, dim), kv = config.window_of(layer), query.shape, key.shape[1]
    scores = jnp.einsum("tkgd,skd->kgts", query.reshape(length, kv, heads // kv, dim) * dim**-0.5, key)
    scores = softcap(scores.astype(jnp.float32), config.attention_softcap)
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(value.dtype)
    return jnp.einsum("kgts,skd->tkgd", shares, value).reshape(query.shape)
