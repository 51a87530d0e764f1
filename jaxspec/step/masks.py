"""Token masks: which tokens may be sampled at a logit row.

A mask has one bit per token, in words of 32 bits, the lowest token in the lowest bit. A step takes one mask for each
constrained row. Steps without any take an array that stays on the device and is never read, so they send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32

WORD = 32


def words(vocab: int) -> int:
    """Number of words in a bit mask over the vocabulary."""
    return -(-vocab // WORD)


def mask_of(allowed: Bool[np.ndarray, " V"]) -> UInt32[np.ndarray, " words"]:
    """The mask of a flag per token."""
    padded = np.zeros(words(len(allowed)) * WORD, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4")


def mask_of_ids(ids: Iterable[int], vocab: int) -> UInt32[np.ndarray, " words"]:
    """The mask that allows these tokens."""
    allowed = np.zeros(vocab, bool)
    allowed[list(ids)] = True
    return mask_of(allowed)


def forbid(
    logits: Float32[Array, "C V"], mask_row: Int32[Array, " C"], masks: UInt32[Array, "C+1 words"]
) -> Float32[Array, "C V"]:
    """Set the logits of masked tokens to -inf. `mask_row`: each row's mask; 0: none."""
    count, vocab = logits.shape
    bits = (masks[mask_row][:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    allowed = (mask_row == 0)[:, None] | (bits.reshape(count, -1)[:, :vocab] > 0)
    return jnp.where(allowed, logits, -jnp.inf)


class MaskBuffers:
    """The mask arrays of steps, by their number of logit rows: `unused` on the device, and reused host buffers.

    Row 0 is never read. Host buffers have `copies`, used in rotation like those of `BatchBuffers`.
    """

    def __init__(self, vocab: int, copies: int = 2) -> None:
        self._words, self._copies = words(vocab), copies
        self._unused: dict[int, Array] = {}
        self._rotation: dict[int, Iterator[UInt32[np.ndarray, "C+1 words"]]] = {}

    def unused(self, rows: int) -> UInt32[Array, "C+1 words"]:
        """The argument of steps without masks."""
        if rows not in self._unused:
            self._unused[rows] = jax.device_put(np.zeros((rows + 1, self._words), np.uint32))
        return self._unused[rows]

    def take(self, rows: int) -> UInt32[np.ndarray, "C+1 words"]:
        """A host buffer; what it holds is undefined."""
        if rows not in self._rotation:
            self._rotation[rows] = cycle([np.zeros((rows + 1, self._words), np.uint32) for _ in range(self._copies)])
        return next(self._rotation[rows])

    def shape(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows + 1, self._words), jnp.uint32)
