"""Matrices on disk as INT8 with a scale for each column or row: a quarter of the size in float32."""

from __future__ import annotations

import numpy as np

from jaxspec.models.load.weights import Weights


def quantized(name: str, matrix: np.ndarray, rows: bool = False) -> Weights:
    """`matrix [a, b]` as `name` int8 and `name.scale` float32, a column's `[b]`, or with `rows` a row's `[a, 1]`."""
    largest = np.abs(matrix).max(1, keepdims=True) if rows else np.abs(matrix).max(0)
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / 127  # zeros stay zeros
    return {name: np.rint(matrix / scale).astype(np.int8), f"{name}.scale": scale.astype(np.float32)}


def restored(stored: Weights) -> Weights:
    """What `quantized` took, nearly, as float32; other tensors as they are. Raises `KeyError` naming a scale that is
    missing."""
    small = {name for name, value in stored.items() if value.dtype == np.int8}
    scales = {f"{name}.scale" for name in small}
    whole = {name: value for name, value in stored.items() if name not in scales}
    return {n: v.astype(np.float32) * stored[f"{n}.scale"] if n in small else v for n, v in whole.items()}
