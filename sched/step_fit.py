"""Step times from measured steps: bounded least squares, so that no size comes out as free and none as faster than a
smaller one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: A size takes at least this share of the fastest step of that size; the rest may be the context's or the drafts'.
LEAST_SHARE = 0.25
#: A step that takes so many times the median of its size was spoiled by a pause of the machine.
PAUSE = 4.0
#: Where the fit would drop every step of a size, those within this share of the size's median stay.
NEAR = 0.5


def fit_steps(size: np.ndarray, extra: np.ndarray, took: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (sizes, ascending; seconds of a step of each; seconds of one of each `extra`).

    size `[n]`: the compiled size of each step; extra `[n, k]`: counts that add to its time; took `[n]`: seconds,
    positive. Seconds of the sizes are positive and never fall, those of the extras are not negative. A size all of
    whose steps were spoiled by pauses is left out.
    """
    kept = took <= PAUSE * _usual(size, took)
    size, extra, took = size[kept], extra[kept], took[kept]
    seen, place = np.unique(size, return_inverse=True)
    # A larger step is not the faster one: what is the least for a size holds for all below it.
    least = LEAST_SHARE * _least_from([took[place == p].min() for p in range(len(seen))])
    median = np.array([_lower_median(took[place == p]) for p in range(len(seen))])[place]
    near = np.abs(took - median) <= NEAR * median
    scale = np.maximum(extra.max(axis=0, initial=0.0), 1.0)  # all columns of a like size, or the fit loses digits
    columns = np.concatenate([(place[:, None] == np.arange(len(seen))).astype(float), extra / scale], axis=1)
    low = np.concatenate([least, np.zeros(extra.shape[1])])
    kept = np.ones(len(took), bool)
    for _ in range(2):
        error = np.abs(took - columns @ _bounded(columns[kept], took[kept], low))
        kept = error <= 5 * np.median(error) + 1e-9
        # A size without a step would have a column of zeros, whose solution is no measurement of anything.
        lost = np.bincount(place, kept, len(seen)) == 0
        kept |= lost[place] & near
    solution = _bounded(columns[kept], took[kept], low)
    steps = _rising(solution[: len(seen)], np.bincount(place, kept, len(seen)))
    return seen, np.maximum(steps, least), solution[len(seen) :] / scale


def _usual(size: np.ndarray, took: np.ndarray) -> np.ndarray:
    """What a step of each one's size usually takes `[n]`: the lower median, which is always a step that was measured,
    and no more than that of a larger size."""
    seen, place = np.unique(size, return_inverse=True)
    return _least_from([_lower_median(took[place == p]) for p in range(len(seen))])[place]


def _lower_median(values: np.ndarray) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _least_from(values: Sequence[float]) -> np.ndarray:
    """The least of each value and those after it."""
    return np.minimum.accumulate(np.asarray(values)[::-1])[::-1]


def _bounded(columns: np.ndarray, took: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Least squares with each coefficient no less than its `low`: what comes out furthest below is held there, and the
    rest solved again (a few columns; SciPy's exact solver would take half a second to import)."""
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


def _rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values that never fall, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many values)
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, before, count = pools.pop()
            total = before + pool[1]
            pool = ((mean * before + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return np.concatenate([np.full(count, mean) for mean, _, count in pools])
