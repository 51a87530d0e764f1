"""Error metrics of a length predictor, and its learning curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from scipy.stats import kendalltau


class Metrics(TypedDict):
    """Quality of predictions. Values without data are NaN.

    rows, capped        number of rows, and of those whose answer was cut
    capped_reached      share of capped rows predicted at least as long as they were when cut
    mae                 mean absolute error in tokens, without capped rows
    error_ratio         `mae` / mean true length, without capped rows
    class_rows          rows whose percentile class is certain
    accuracy, macro_f1  over `class_rows`; macro F1 is the mean over the classes that occur
    tau                 Kendall's τ-b
    """

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
    """Compare `predicted [rows]` with true lengths `[rows]` (of `capped [rows]` answers: tokens before the cut).

    `bounds`: the classes' lower bounds, from `jaxspec.predict.formulation.class_bounds` of the training lengths. A
    length's class is the number of bounds that are not above it.
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
    """For JSON: floats rounded to four digits, NaN as None."""
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


class Evaluation(TypedDict):
    """One point of the learning curve.

    step        steps so far, of both phases
    phase       1 (all weights) or 2 (head only)
    train       mean loss since the previous evaluation, None before the first step
    validation  loss on the validation part
    mae, tau    mean absolute error in tokens and Kendall's τ on the validation part, None if undefined
    """

    step: int
    phase: int
    train: float | None
    validation: float
    mae: float | None
    tau: float | None


def plot(evaluations: Sequence[Evaluation], axes: Any) -> None:
    """Plot losses against steps, with a line where phase 2 begins, on matplotlib's `axes`."""
    known = [(e["step"], e["train"]) for e in evaluations if e["train"] is not None]
    axes.plot([s for s, _ in known], [loss for _, loss in known], marker=".", label="training")
    axes.plot([e["step"] for e in evaluations], [e["validation"] for e in evaluations], marker="o", label="validation")
    if second := [e["step"] for e in evaluations if e["phase"] == 2]:
        axes.axvline(second[0], color="grey", linestyle="--", label="head only from here")
    axes.set(xlabel="steps", ylabel="loss")
    axes.legend()
