"""Matrices as a checkpoint stores them, for backends that keep weights as small as they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

#: Kinds of floating-point numbers.
FLOATS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
#: int8 with a float32 scale per output, as in the package's own drafter files.
INT8 = "I8"


def dequantized(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Float32 values of floats, or by the `gguf` package of blocks `[…, bytes]` of a GGUF type."""
    if kind in FLOATS:
        return np.asarray(blocks, np.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(blocks, GGMLQuantizationType[kind]), np.float32)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix `[out, in]` that is read when it is used.

    `kind`: of `FLOATS`, `INT8`, or a GGUF quantisation type such as `Q4_1`. `read` returns floats `[out, in]`, int8
    `[out, in]`, or the quantised blocks `[out, bytes]` uint8. `scale [out]` float32: of int8 values.
    """

    kind: str
    shape: tuple[int, int]
    read: Callable[[], np.ndarray]
    scale: np.ndarray | None = None

    @classmethod
    def of(cls, matrix: np.ndarray) -> StoredMatrix:
        """A stored matrix of an array `[out, in]` in memory; data types other than `FLOATS` become float32."""
        kind = next((kind for kind, dtype in FLOATS.items() if matrix.dtype == dtype), "F32")
        return cls(kind, (matrix.shape[0], matrix.shape[1]), lambda: np.asarray(matrix, FLOATS[kind]))

    @classmethod
    def int8(cls, codes: np.ndarray, scale: np.ndarray) -> StoredMatrix:
        """A stored matrix of int8 `codes [out, in]` with one float32 scale per output; `scale` has any shape."""
        return cls(INT8, (codes.shape[0], codes.shape[1]), lambda: codes, scale.reshape(-1))

    @classmethod
    def read_by(cls, read: Callable[[], np.ndarray], shape: tuple[int, int]) -> StoredMatrix:
        """A stored matrix of an array `[out, in]` of unknown type, read as float32, which holds all types exactly."""
        return cls("F32", shape, lambda: np.asarray(read(), np.float32))

    def rows(self, index: np.ndarray | slice) -> StoredMatrix:
        """The matrix with only the outputs `index`, in that order."""
        scale, count = None if self.scale is None else self.scale[index], len(np.arange(self.shape[0])[index])
        return replace(self, shape=(count, self.shape[1]), read=lambda: self.read()[index], scale=scale)

    def floats(self) -> np.ndarray:
        """The weights `[out, in]` as float32."""
        values = self.read()
        if self.scale is not None:
            return values.astype(np.float32) * self.scale[:, None]
        return dequantized(values, self.kind).reshape(self.shape)


def fused_shape(parts: Sequence[StoredMatrix]) -> tuple[int, int]:
    """`in` and the sum of `out` of matrices that are fused. Raises `ValueError` if their `in` differ."""
    depths = {part.shape[1] for part in parts}
    if len(depths) != 1:
        raise ValueError(f"matrices of different depths {sorted(depths)} cannot be fused")
    return depths.pop(), sum(part.shape[0] for part in parts)
