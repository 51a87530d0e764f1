"""The small parts that decoders share: RMS norm, linear maps, rotary positions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import DecoderConfig, RopeScaling

#: (x [T, in], weight, width of the result, layer or None) -> [T, width]; the last two for weights that are padded or
#: stacked over layers.
Product = Callable[[jax.Array, jax.Array, int, jax.Array | None], jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    f = x.astype(jnp.float32)
    return (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def linear(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None) -> jax.Array:
    """`x [T, in]` times `weight [in, out]`: XLA's own product. Others (`Product`) hold weights in other ways."""
    return x @ weight


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Rotary inverse frequencies `[head_dim / 2]`, float32, with the model's scaling applied."""
    dim = config.head_dim
    inv = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = config.rope_scaling
    if scaling is None:
        return inv.astype(np.float32)
    if scaling.kind == "linear":
        return (inv / scaling.factor).astype(np.float32)
    return _llama3(inv, scaling).astype(np.float32)


def _llama3(inv: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns = s.original_max_position * inv / (2 * np.pi)
    blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - blend) * inv / s.factor + blend * inv


def rope_tables(positions: jax.Array, inv: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, head_dim / 2]`, float32, of `positions [T]`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of `x [T, heads, head_dim]`, halves paired as Hugging Face does.

    The halves are swapped by reversing an axis of two: XLA on CPU makes a concatenation of them a branch an element.
    """
    cos, sin = (t[:, None, None, :].astype(x.dtype) for t in rope)
    halves = x.reshape(*x.shape[:-1], 2, -1)
    sign = jnp.asarray([[-1], [1]], x.dtype)
    return (halves * cos + jnp.flip(halves, -2) * (sign * sin)).reshape(x.shape)
