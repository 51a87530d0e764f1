"""Random matrices in every stored form, and packed for the CPU kernels."""

from __future__ import annotations

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.packed import pack
from jaxspec.models.load.stored import FLOATS, INT8, StoredMatrix

#: GGUF type -> the bytes of a block that hold float16 numbers.
_HALVES = {"Q4_0": (0, 2), "Q5_0": (0, 2), "Q8_0": (0, 2), "Q6_K": (208, 210), "Q3_K": (108, 110)}


def packed(matrices: Any) -> jax.Array:
    """Pack float32 matrices `[layers, in, out]`."""
    return jnp.asarray(pack([[StoredMatrix.of(np.asarray(w).T)] for w in matrices]))


def stored_matrix(kind: str, out: int, depth: int, rng: np.random.Generator) -> StoredMatrix:
    """A random matrix of this kind, with values of about 1. `depth` must be a multiple of the kind's block."""
    if kind in FLOATS:
        return StoredMatrix.of(rng.normal(size=(out, depth)).astype(FLOATS[kind]))
    if kind == INT8:
        codes = rng.integers(-127, 128, (out, depth), np.int8)
        return StoredMatrix(INT8, (out, depth), lambda: codes, rng.uniform(0.001, 0.02, out).astype(np.float32))
    size, stored = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (out, depth // size, stored), np.uint8)
    first, end = _HALVES.get(kind, (0, 4))
    scales = (rng.normal(size=(out, depth // size, (end - first) // 2)) * 0.01).astype(np.float16)
    blocks[..., first:end] = scales.view(np.uint8)
    return StoredMatrix(kind, (out, depth), lambda: blocks.reshape(out, -1))
