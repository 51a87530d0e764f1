"""Evaluation of a predictor: error metrics and the learning curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from scipy.stats import kendalltau

from jaxspec.draft.distill.curve import keep


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


class Evaluation(TypedDict):
    """step: of both phases together; phase: 1 (all weights) or 2 (head only); train: mean loss of the steps since the
    evaluation before (None: no step was made); validation: loss of the validation part; mae in tokens and Kendall's τ
    there (None: no number)."""

    step: int
    phase: int
    train: float | None
    validation: float
    mae: float | None
    tau: float | None


def write(evaluations: Sequence[Evaluation], folder: Path, title: str) -> None:
    """Both files, anew; without matplotlib the picture is left out."""
    keep(evaluations, folder, lambda path: draw(evaluations, path, title))


def draw(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Losses against steps, a line where the second phase begins. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib.figure import Figure  # the optional extra `bench`

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    known = [(e["step"], e["train"]) for e in evaluations if e["train"] is not None]
    axes.plot([s for s, _ in known], [loss for _, loss in known], marker=".", label="training")
    axes.plot([e["step"] for e in evaluations], [e["validation"] for e in evaluations], marker="o", label="validation")
    if second := [e["step"] for e in evaluations if e["phase"] == 2]:
        axes.axvline(second[0], color="grey", linestyle="--", label="from here on the head only")
    axes.set(xlabel="steps", ylabel="loss", title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
