"""What the training of a length predictor prints: each metric next to the same one of a constant prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.train_predictor.evaluate import Evaluation, Metrics, evaluate

#: Metrics of fewer rows are given with a warning.
FEW = 30
#: Metric -> the baseline that stands next to it.
_BASELINES = {
    "mae": "the training median",
    "error_ratio": "the training median",
    "capped_reached": "the training median",
    "accuracy": "the most frequent class",
    "macro_f1": "the most frequent class",
    "tau": "a constant",
}


def baseline(training: np.ndarray, length: np.ndarray, capped: np.ndarray, bounds: np.ndarray) -> Metrics:
    """Metrics of constants, of the rows that `evaluate` compares: errors of the median of the `training` lengths,
    classes if every row were of the most frequent training class, and a τ of 0."""
    classes = np.digitize(training, bounds)
    typical = training[classes == np.bincount(classes).argmax()][0]
    median, frequent = (
        evaluate(np.full(len(length), value, float), length, capped, bounds) for value in (np.median(training), typical)
    )
    return {**median, "accuracy": frequent["accuracy"], "macro_f1": frequent["macro_f1"], "tau": 0.0}


def evaluation_line(e: Evaluation, first: Evaluation, constant: Metrics, seconds: float) -> str:
    """One evaluation on the validation part. `first`: the run's first, before training; `constant`: from `baseline`."""
    train = "" if e["train"] is None else f"training loss {e['train']:.4g}, "
    loss = f"validation loss {e['validation']:.4g}"
    if e is not first:
        loss += f" (untrained: {first['validation']:.4g})"
    mae, tau = _beside("mae", e, constant), _beside("tau", e, constant)
    return f"step {e['step']}, phase {e['phase']}, {seconds:.0f} s: {train}{loss}, {mae}, {tau}"


def report_lines(found: Metrics, constant: Metrics) -> str:
    """The metrics of the test part, and warnings about those of few rows."""
    lines = [f"test part: {found['rows']} rows, {found['capped']} of them capped"]
    known = [name for name in _BASELINES if found[name] == found[name]]  # the others are NaN
    lines += [f"  {_beside(name, found, constant)}" for name in known]
    complete = found["rows"] - found["capped"]
    for names, rows in (
        ("mae and error_ratio", complete), ("accuracy and macro_f1", found["class_rows"]), ("tau", found["rows"])
    ):  # fmt: skip
        if rows < FEW:
            lines.append(few(names, rows, "rows"))
    return "\n".join(lines)


def few(names: str, count: int, what: str) -> str:
    """The warning about metrics (`names`) of few rows."""
    return f"warning: {names} come from {count} {what} only and say little; collect more answers"


def _beside(name: str, found: Mapping[str, Any], constant: Mapping[str, Any]) -> str:
    """`mae 82 (the training median: 120)`."""
    return f"{name} {_number(found[name])} ({_BASELINES[name]}: {_number(constant[name])})"


def _number(value: float | None) -> str:
    return "unknown" if value is None or value != value else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
