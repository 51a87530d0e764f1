"""A small index of lengths, vectors of texts, and an index's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from helpers.predictors import vector
from jaxspec.predict import index_file
from jaxspec.predict.index import LengthIndex

PROBE = vector("probe")


def index(k: int = 3, threshold: float = 0.9, capacity: int = 100) -> LengthIndex:
    return LengthIndex(k, threshold, capacity)


def vectors(*texts: str) -> np.ndarray:
    return np.stack([vector(text) for text in texts])


def written(path: Path) -> Path:
    """The file of an index of three texts."""
    own = index()
    own.insert(vectors("a", "b", "c"), [1, 2, 3])
    index_file.write(path, own.rows(), "model", PROBE)
    return path
