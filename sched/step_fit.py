"""Step times by size from a recording of steps: bounded least squares, positive and not falling with size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Lower bound of a size's time as a share of its fastest step; the rest may be due to context or drafts.
LEAST_SHARE = 0.25
#: A step that takes this many times the median of its size was delayed by a pause of the machine.
PAUSE = 4.0
#: If the fit would drop all steps of a size, those within this share of the size's median stay.
NEAR = 0.5


def fit_steps(size: np.ndarray, extra: np.ndarray, took: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (sizes, ascending; seconds of a step of each size; seconds per unit of each `extra`).

    size `[n]`: bucket of each step; extra `[n, k]`: counts that add to its time; took `[n]`: seconds, positive. The
    sizes' seconds are positive and ascending, those of the extras not negative. A size whose steps were all delayed by
    pauses is left out.
    """
    kept = took <= PAUSE * _usual(size, took)
    size, extra, took = size[kept], extra[kept], took[kept]
    seen, place = np.unique(size, return_inverse=True)
    # A larger step is not faster: the least time of a size bounds all smaller sizes.
    least = LEAST_SHARE * _least_from([took[place == p].min() for p in range(len(seen))])
    median = np.array([_lower_median(took[place == p]) for p in range(len(seen))])[place]
    near = np.abs(took - median) <= NEAR * median
    scale = np.maximum(extra.max(axis=0, initial=0.0), 1.0)  # columns of similar magnitude, for precision
    columns = np.concatenate([(place[:, None] == np.arange(len(seen))).astype(float), extra / scale], axis=1)
    low = np.concatenate([least, np.zeros(extra.shape[1])])
    kept = np.ones(len(took), bool)
    for _ in range(2):
        error = np.abs(took - columns @ _bounded(columns[kept], took[kept], low))
        kept = error <= 5 * np.median(error) + 1e-9
        # A size without a step would have a column of zeros and no defined solution.
        empty = np.bincount(place, kept, len(seen)) == 0
        kept |= empty[place] & near
    solution = _bounded(columns[kept], took[kept], low)
    steps = rising(solution[: len(seen)], np.bincount(place, kept, len(seen)))
    return seen, np.maximum(steps, least), solution[len(seen) :] / scale


def _usual(size: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Typical seconds of each step's size `[n]`: the lower median, a measured value, at most that of larger sizes."""
    seen, place = np.unique(size, return_inverse=True)
    return _least_from([_lower_median(took[place == p]) for p in range(len(seen))])[place]


def _lower_median(values: np.ndarray) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _least_from(values: Sequence[float]) -> np.ndarray:
    """The minimum of each value and all after it."""
    return np.minimum.accumulate(np.asarray(values)[::-1])[::-1]


def _bounded(columns: np.ndarray, took: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Least squares with lower bounds `low`: fix the coefficient furthest below its bound and solve the rest again.

    There are few columns; importing SciPy's exact solver would take half a second.
    """
    solution, free = low.copy(), np.ones(len(low), bool)
    norm = np.sqrt((columns**2).sum(axis=0))
    while free.any():
        solution[free] = np.linalg.lstsq(columns[:, free], took - columns[:, ~free] @ low[~free], rcond=None)[0]
        below = np.where(free, (low - solution) * norm, 0.0)
        worst = int(below.argmax())
        if below[worst] <= 0:
            break
        free[worst], solution[worst] = False, low[worst]
    return np.maximum(solution, low)


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Isotonic regression: the nearest non-decreasing values `[n]` by weighted squares (pool adjacent violators)."""
    if (values[1:] >= values[:-1]).all():
        return values
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many values)
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, before, count = pools.pop()
            total = before + pool[1]
            pool = ((mean * before + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return np.concatenate([np.full(count, mean) for mean, _, count in pools])
