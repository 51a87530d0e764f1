"""SPIN's request decomposition (§V-A): KV in rows of L positions, and the search for L.

The engine needs no L (`jaxspec/kernels/attention.c`, `jaxspec.step.attention`); this measures how close it is to the
best one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Decomposition:
    """`rows` rows of `length` positions each, of which `padded` in total are padding."""

    length: int
    rows: int
    padded: int


def best(lengths: np.ndarray, width: int, unit: int = 1) -> Decomposition:
    """The decomposition with the fewest padded positions in at most `width` rows.

    lengths `[requests]`: KV lengths; each row belongs to one request. Tries all multiples of `unit` up to the longest
    request; ties go to the largest L, which has the fewest rows. Raises ValueError if there are fewer rows than
    requests.
    """
    if width < len(lengths):
        raise ValueError(f"{width} rows are too few for {len(lengths)} requests")
    tried = unit * np.arange(-(-int(lengths.max()) // unit), 0, -1)
    rows = (-(-lengths // tried[:, None])).sum(1)
    padded = rows * tried - lengths.sum()
    i = int(np.argmin(np.where(rows <= width, padded, np.iinfo(padded.dtype).max)))
    return Decomposition(int(tried[i]), int(rows[i]), int(padded[i]))
