"""Channel-wise asymmetric INT8 quantisation of a page's KV (ALISE §3.2, equation 8).

A channel is one component of one head's keys or values in one layer, over the positions of one page. Channels of keys
differ greatly in magnitude, so each has its own scale λ = (max - min) / 255 and zero point z = round(-min / λ), and
q = round(x / λ + z). λ is stored as bfloat16, rounded up, and z as int16: with pages of 32 positions that is 9 bits per
number, 28 % of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

#: Bytes of λ and z per channel and page.
CHANNEL_BYTES = 4
#: Largest zero point. A channel whose values are far from zero relative to their range gets λ = |x| / 32000, so that z
#: fits 16 bits.
FARTHEST = 32000
_TINY = 1e-30


class Quantized(NamedTuple):
    """Quantised values: `|x - dequantize(...)| <= scale / 2`, up to float32 rounding."""

    codes: jax.Array  # uint8, x's shape
    scale: jax.Array  # bfloat16, x's shape without the axis of positions
    zero: jax.Array  # int16, the same


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` rounded to a narrower float type, in float32. XLA may drop a conversion there and back, but not this."""
    narrow = jnp.finfo(dtype)
    return lax.reduce_precision(x.astype(jnp.float32), narrow.nexp, narrow.nmant)


def quantize(x: jax.Array, axis: int, valid: jax.Array | None = None) -> Quantized:
    """Quantise `x`; the values of a channel lie along `axis`.

    Values where `valid` (broadcastable to x's shape) is false do not affect the scale; their codes are undefined.
    """
    x = x.astype(jnp.float32)
    below, above = (x, x) if valid is None else (jnp.where(valid, x, jnp.inf), jnp.where(valid, x, -jnp.inf))
    low, high = jnp.min(below, axis), jnp.max(above, axis)
    if valid is not None:
        any_valid = low <= high
        low, high = jnp.where(any_valid, low, 0), jnp.where(any_valid, high, 0)
        x = jnp.where(valid, x, 0)
    scale = jnp.maximum((high - low) / 255, jnp.maximum(jnp.abs(low), jnp.abs(high)) / FARTHEST)
    wide = rounded(jnp.maximum(scale, _TINY) * (1 + 2**-8), jnp.bfloat16)  # never below, whatever the rounding
    zero = jnp.round(-low / wide)
    codes = jnp.clip(jnp.round(x / jnp.expand_dims(wide, axis) + jnp.expand_dims(zero, axis)), 0, 255)
    return Quantized(codes.astype(jnp.uint8), wide.astype(jnp.bfloat16), zero.astype(jnp.int16))


def dequantize(q: Quantized, axis: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """(q - z) λ as `dtype`."""
    scale, zero = (jnp.expand_dims(x.astype(jnp.float32), axis) for x in (q.scale, q.zero))
    return ((q.codes.astype(jnp.float32) - zero) * scale).astype(dtype)
