"""How good predictions are, and what a capped row may say about it.

An answer that was cut at L tokens would have been at least L + 1 long, and no more is known. So it has no part in
errors of the length; it counts for classes where its class is certain (no class bound lies above L); and in Kendall's
τ it stands at L, tied with others cut there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from scipy.stats import kendalltau


class Metrics(TypedDict):
    """rows, and of them capped; capped_reached: share of the capped ones predicted to be at least as long as they got;
    mae: mean absolute error in tokens; error_ratio: that divided by the mean true length, both without capped rows;
    class_rows: rows whose class is certain; accuracy and macro_f1 over these (F1: mean over the classes that occur);
    tau: Kendall's τ-b. NaN where nothing could be computed."""

    rows: int
    capped: int
    capped_reached: float
    mae: float
    error_ratio: float
    class_rows: int
    accuracy: float
    macro_f1: float
    tau: float


def evaluate(predicted: np.ndarray, length: np.ndarray, capped: np.ndarray, bounds: np.ndarray) -> Metrics:
    """All `[rows]`: predicted lengths, true ones (of capped rows: what was written), whether they were cut.

    `bounds`: as `jaxspec.predict.formulation.class_bounds` finds them among training lengths; a length is in the class
    of as many of them as are no greater than it.
    """
    known = ~capped
    error = np.abs(predicted - length)[known]
    mae = _mean(error)
    certain = known | (length >= (bounds.max() if bounds.size else 0))
    true, guess = np.digitize(length[certain], bounds), np.digitize(predicted[certain], bounds)
    tau: Any = kendalltau(predicted, length)[0] if len(length) > 1 else np.nan
    return {
        "rows": len(length),
        "capped": int(capped.sum()),
        "capped_reached": _mean((predicted >= length)[capped]),
        "mae": mae,
        "error_ratio": mae / _mean(length[known]),
        "class_rows": int(certain.sum()),
        "accuracy": _mean(true == guess),
        "macro_f1": macro_f1(true, guess),
        "tau": float(tau),
    }


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON: four digits, None for what is no number."""
    return {
        key: (round(value, 4) if value == value else None) if isinstance(value, float) else value
        for key, value in values.items()
    }


def macro_f1(true: np.ndarray, guess: np.ndarray) -> float:
    """Mean F1 over the classes in `true [rows]`."""
    scores = []
    for c in np.unique(true):
        hits = np.sum((true == c) & (guess == c))
        scores.append(2 * hits / (np.sum(true == c) + np.sum(guess == c)))
    return _mean(np.asarray(scores))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
