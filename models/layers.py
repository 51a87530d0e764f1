"""Building blocks of decoders: RMS norm, linear layers, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import DecoderConfig, RopeScaling

#: Matrix product: (x [T, in], weight, out, layer index or None) -> [T, out] float32. `out` and the layer index are for
#: weights that are padded or stacked over layers.
Product = Callable[[jax.Array, jax.Array, int, jax.Array | None], jax.Array]

#: Embedding: (weight, tokens [T] int32, vocab, hidden) -> [T, hidden]. Tokens out of bounds are clipped.
Lookup = Callable[[jax.Array, jax.Array, int, int], jax.Array]
#: RMS norm over the last axis: (x [..., size], weight [size], epsilon) -> [..., size]
Norm = Callable[[jax.Array, jax.Array, float], jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    f = x.astype(jnp.float32)
    return (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def linear(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None) -> jax.Array:
    """The `Product` with XLA, for plain weights: `x [T, in]` times `weight [in, out]`."""
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


def lookup(weight: jax.Array, tokens: jax.Array, vocab: int, hidden: int) -> jax.Array:
    """The `Lookup` with XLA, for a plain `weight [vocab, hidden]`."""
    return weight.at[tokens].get(mode="clip")


class Operations(NamedTuple):
    """The operations of a decoder that CPU kernels can replace."""

    product: Product = linear
    lookup: Lookup = lookup
    norm: Norm = rms_norm


XLA = Operations()


def dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, window: int | None = None) -> jax.Array:
    """Causal attention of one sequence without a KV cache, over the last `window` positions if given.

    `query [T, heads, head_dim]`, `key` and `value [T, kv_heads, head_dim]` -> `[T, heads, head_dim]`.
    """
    behind = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=behind)


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Rotary inverse frequencies `[head_dim / 2]` float32, with the model's `rope_scaling` applied."""
    dim = config.head_dim
    inv = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = config.rope_scaling
    if scaling is None:
        return inv.astype(np.float32)
    if scaling.kind == "linear":
        return (inv / scaling.factor).astype(np.float32)
    return _llama3(inv, scaling).astype(np.float32)


def _llama3(inv: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Llama 3.1 scaling: low frequencies are divided by `factor`, high ones kept, those in between interpolated."""
    rotations = s.original_max_position * inv / (2 * np.pi)
    blend = np.clip((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - blend) * inv / s.factor + blend * inv


def rope_tables(positions: jax.Array, inv: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, head_dim / 2]` float32 for `positions [T]`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply rotary embeddings to `x [T, heads, head_dim]`, halves paired as in Hugging Face.

    The halves are swapped by flipping an axis of size two: XLA on CPU compiles a concatenation to a branch per element.
    """
    cos, sin = (t[:, None, None, :].astype(x.dtype) for t in rope)
    halves = x.reshape(*x.shape[:-1], 2, -1)
    sign = jnp.asarray([[-1], [1]], x.dtype)
    return (halves * cos + jnp.flip(halves, -2) * (sign * sin)).reshape(x.shape)
