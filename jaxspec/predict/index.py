"""Lengths of answered requests, found again by the embedding of their prompts (ALISE §3.1)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Two embeddings of the same text are at least so similar: batches of another shape round differently.
SAME = 0.9999
#: Share of the capacity that is freed at once: taking rows out moves those behind them.
_FREED = 1 / 64


@dataclass(frozen=True, slots=True)
class Rows:
    """An index as plain arrays: unit vectors `[n, H]` float32, true lengths `[n]` float32, and the turns at which each
    row was put in and last of use, `[n]` int64."""

    vectors: np.ndarray
    lengths: np.ndarray
    inserted: np.ndarray
    used: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: np.ndarray) -> Rows:
        return Rows(self.vectors[rows], self.lengths[rows], self.inserted[rows], self.used[rows])


class LengthIndex:
    """The `k` most similar prompts of similarity (cosine) `threshold` or more say how long an answer will be.

    The search is exact: the index is small enough (0.4 ms for 10,000 rows), and an approximate one would have to be
    trained anew as rows come and go. It holds at most `capacity` rows. When it is full, the rows that have gone longest
    without being put in or found are dropped: a prompt that keeps coming keeps its rows, those seen once go in the
    order of their age. Of a prompt that comes again and again only the last `k` lengths are kept, as no search would
    see more of them. Safe to use from several threads.
    """

    def __init__(self, k: int, threshold: float, capacity: int) -> None:
        """Raises `ImportError` where FAISS is not installed."""
        import faiss

        self.k, self.threshold, self.capacity = k, threshold, capacity
        self._faiss: Any = faiss
        self._lock = threading.Lock()
        self._turn = 0
        self._index: Any = None  # made by the first row, which says how wide rows are
        self._lengths = np.zeros(0, np.float32)
        self._inserted = np.zeros(0, np.int64)
        self._used = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def estimate(self, vectors: np.ndarray) -> np.ndarray:
        """The neighbours' true lengths, weighted by similarity, for unit vectors `[n, H]`; -> `[n]` float64, NaN where
        no neighbour is near enough. Raises `ValueError` if the rows are of another width."""
        vectors = _rows(vectors)
        out = np.full(len(vectors), np.nan)
        with self._lock:
            for i, vector in enumerate(vectors):
                similarity, found = self._nearest(vector)
                near = similarity >= self.threshold
                if near.any():
                    out[i] = np.average(self._lengths[found[near]], weights=similarity[near])
                    self._turn += 1
                    self._used[found[near]] = self._turn
        return out

    def insert(self, vectors: np.ndarray, lengths: Sequence[float] | np.ndarray) -> None:
        """Add unit vectors `[n, H]` with the true lengths of their answers `[n]`; what is no such pair is left out.

        Raises `ValueError` if the rows are of another width.
        """
        vectors, lengths = _rows(vectors), np.asarray(lengths, np.float32)
        if lengths.shape != (len(vectors),):
            raise ValueError(f"{lengths.size} lengths for {len(vectors)} vectors")
        with np.errstate(invalid="ignore"):
            good = (np.abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3) & np.isfinite(lengths) & (lengths > 0)
        with self._lock:
            for vector, length in zip(vectors[good], lengths[good], strict=True):
                self._insert(vector, length)

    def rows(self) -> Rows:
        """A copy of what it holds."""
        with self._lock:
            width = 0 if self._index is None else self._index.d
            vectors = np.zeros((0, width), np.float32)
            if self._index is not None and len(self._lengths):
                vectors = np.array(self._index.reconstruct_n(0, len(self._lengths)))
            return Rows(vectors, self._lengths.copy(), self._inserted.copy(), self._used.copy())

    def restore(self, rows: Rows) -> None:
        """Hold these rows in place of its own; of too many, those used last."""
        if len(rows) > self.capacity:
            rows = rows.take(np.sort(np.argsort(rows.used, kind="stable")[-self.capacity :]))
        with self._lock:
            self._index = self._faiss.IndexFlatIP(rows.vectors.shape[1]) if len(rows) else None
            if len(rows):
                self._index.add(_rows(rows.vectors))
            self._lengths, self._inserted = rows.lengths.astype(np.float32), rows.inserted.astype(np.int64)
            self._used = rows.used.astype(np.int64)
            self._turn = int(max(self._used.max(), self._inserted.max())) if len(rows) else 0

    # -- with the lock held ----------------------------------------------------------------------------------------

    def _nearest(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Similarities and rows of the nearest, at most `k`, the most similar first.

        One vector at a time: FAISS then stays in the calling thread, and its others don't spin beside the engine's.
        """
        if not len(self._lengths):
            return np.zeros(0, np.float32), np.zeros(0, np.int64)
        self._check(vector)
        similarity, found = self._index.search(vector[None], min(self.k, len(self._lengths)))
        seen = found[0] >= 0  # a NaN is similar to nothing
        return similarity[0][seen], found[0][seen]

    def _insert(self, vector: np.ndarray, length: np.float32) -> None:
        similarity, found = self._nearest(vector)
        self._turn += 1
        if len(found) == self.k and similarity[-1] >= SAME:
            oldest = found[np.argmin(self._inserted[found])]
            self._lengths[oldest] = length
            self._inserted[oldest] = self._used[oldest] = self._turn
            return
        if len(self._lengths) >= self.capacity:
            self._evict(max(1, int(self.capacity * _FREED)))
        if self._index is None:
            self._index = self._faiss.IndexFlatIP(len(vector))
        self._check(vector)
        self._index.add(vector[None])
        self._lengths = np.append(self._lengths, length)
        self._inserted = np.append(self._inserted, self._turn)
        self._used = np.append(self._used, self._turn)

    def _evict(self, count: int) -> None:
        rows = np.argsort(self._used, kind="stable")[:count].astype(np.int64)
        self._index.remove_ids(rows)  # the others close up in order, as the arrays do
        self._lengths, self._inserted, self._used = (
            np.delete(a, rows) for a in (self._lengths, self._inserted, self._used)
        )

    def _check(self, vector: np.ndarray) -> None:
        if len(vector) != self._index.d:
            raise ValueError(f"vectors of {len(vector)} numbers in an index of {self._index.d}")


def _rows(vectors: np.ndarray) -> np.ndarray:
    vectors = np.ascontiguousarray(vectors, np.float32)
    if vectors.ndim != 2:
        raise ValueError(f"vectors are rows of a matrix, not an array of {vectors.ndim} dimensions")
    return vectors
