"""SPIN's request decomposition as the paper does it (§V-A): KV in rows of L positions, and the search for L.

The engine has no L to search (`jaxspec/kernels/attention.c`, `jaxspec.step.attention`); this says how far it is from
the best one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Rows of `length` positions, `padded` of all those positions hold nothing."""

    length: int
    rows: int
    padded: int


def best(lengths: np.ndarray, width: int, unit: int = 1) -> Decomposition:
    """The L that leaves the fewest padded positions in at most `width` rows, of all multiples of `unit` up to the one
    that holds the longest request; of equals the longest, which has the fewest rows.

    Each row belongs to one of the requests, whose KV lengths are `lengths` (`[requests]`). Raises ValueError if there
    are fewer rows than requests.
    """
    if width < len(lengths):
        raise ValueError(f"{width} rows are too few for {len(lengths)} requests")
    tried = unit * np.arange(-(-int(lengths.max()) // unit), 0, -1)
    rows = (-(-lengths // tried[:, None])).sum(1)
    padded = rows * tried - lengths.sum()
    at = int(np.argmin(np.where(rows <= width, padded, np.iinfo(padded.dtype).max)))
    return Decomposition(int(tried[at]), int(rows[at]), int(padded[at]))
