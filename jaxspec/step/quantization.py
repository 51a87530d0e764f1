"""Channel-wise asymmetric INT8 of a page's KV (ALISE §3.2, equation 8).

A channel is one component of one head's keys or values in one layer, over the positions of one page: keys have channels
of very different size, so each has a scale λ = (max - min) / 255 and a zero point z = round(-min / λ) of its own, and
q = round(x / λ + z). λ is kept in bfloat16, rounded up, and z in 16 bits: with pages of 32 positions that is 9 bits a
number, 28 % of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

#: Bytes of a channel's λ and z in a page.
CHANNEL_BYTES = 4
#: Largest zero point. A channel far from zero for its width gets a larger λ, |x| / 32000, so that z fits 16 bits.
FARTHEST = 32000
_TINY = 1e-30


class Quantized(NamedTuple):
    """`|x - dequantize(...)| <= scale / 2`, beside what float32 itself rounds."""

    codes: jax.Array  # uint8, x's shape
    scale: jax.Array  # bfloat16, x's shape without the axis of positions
    zero: jax.Array  # int16, the same


def quantize(x: jax.Array, axis: int, valid: jax.Array | None = None) -> Quantized:
    """`x` by channels whose values lie along `axis`. Those where `valid` (of a shape that broadcasts) is false count
    for nothing and become anything."""
    x = x.astype(jnp.float32)
    below, above = (x, x) if valid is None else (jnp.where(valid, x, jnp.inf), jnp.where(valid, x, -jnp.inf))
    low, high = jnp.min(below, axis), jnp.max(above, axis)
    if valid is not None:
        some = low <= high
        low, high = jnp.where(some, low, 0), jnp.where(some, high, 0)
        x = jnp.where(valid, x, 0)
    scale = jnp.maximum((high - low) / 255, jnp.maximum(jnp.abs(low), jnp.abs(high)) / FARTHEST)
    scale = (jnp.maximum(scale, _TINY) * (1 + 2**-8)).astype(jnp.bfloat16)  # not below, however that rounds
    wide = scale.astype(jnp.float32)
    zero = jnp.round(-low / wide)
    codes = jnp.clip(jnp.round(x / jnp.expand_dims(wide, axis) + jnp.expand_dims(zero, axis)), 0, 255)
    return Quantized(codes.astype(jnp.uint8), scale, zero.astype(jnp.int16))


def dequantize(q: Quantized, axis: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """(q - z) λ."""
    scale, zero = (jnp.expand_dims(x.astype(jnp.float32), axis) for x in (q.scale, q.zero))
    return ((q.codes.astype(jnp.float32) - zero) * scale).astype(dtype)
