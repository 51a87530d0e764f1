"""Metrics next to their baselines."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.predict.formulation import class_bounds
from jaxspec.train_predictor.evaluate import Evaluation, evaluate
from jaxspec.train_predictor.report import FEW, baseline, evaluation_line, report_lines

TRAINING = np.asarray([1, 2, 3, 10, 10, 10, 10, 10, 80, 90])
LENGTH, CAPPED = np.asarray([10, 12, 30, 100]), np.asarray([False, False, False, True])
BOUNDS = np.asarray(class_bounds(TRAINING, 3))


def test_the_baseline_is_the_best_constant_of_each_kind() -> None:
    found = baseline(TRAINING, LENGTH, CAPPED, BOUNDS)
    median = np.median(TRAINING)
    assert found["mae"] == pytest.approx(np.abs(LENGTH - median)[~CAPPED].mean())
    classes = np.digitize(LENGTH, BOUNDS)
    share = max((np.digitize(TRAINING, BOUNDS) == c).mean() for c in range(3))
    (frequent,) = [c for c in range(3) if (np.digitize(TRAINING, BOUNDS) == c).mean() == share]
    assert found["accuracy"] == (classes == frequent).mean()
    assert found["tau"] == 0 and found["rows"] == 4


def test_every_metric_has_its_baseline() -> None:
    found = evaluate(np.asarray([11.0, 12, 31, 40]), LENGTH, CAPPED, BOUNDS)
    head, *lines = report_lines(found, baseline(TRAINING, LENGTH, CAPPED, BOUNDS)).splitlines()
    assert head == "test part: 4 rows, 1 of them capped"
    assert f"  mae {found['mae']:.3g} (the training median: 7.33)" in lines
    measured = [line for line in lines if line.startswith("  ")]
    assert len(measured) == 6 and all(": " in line for line in measured)
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 3 and "mae and error_ratio come from 3 rows only" in warnings[0]


def test_many_rows_get_no_warning() -> None:
    length = np.arange(1, FEW + 2)
    found = evaluate(length + 1.0, length, length < 0, BOUNDS)
    assert "warning" not in report_lines(found, baseline(TRAINING, length, length < 0, BOUNDS))


def test_an_evaluation_names_the_loss_before_training() -> None:
    first = Evaluation(step=0, phase=1, train=None, validation=2.0, mae=200.0, tau=None)
    last = Evaluation(step=9, phase=2, train=0.5, validation=1.0, mae=3.0, tau=0.25)
    constant = baseline(TRAINING, LENGTH, CAPPED, BOUNDS)
    assert evaluation_line(first, first, constant, 0.2) == (
        "step 0, phase 1, 0 s: validation loss 2, mae 200 (the training median: 7.33), tau unknown (a constant: 0)"
    )
    assert "training loss 0.5, validation loss 1 (untrained: 2), mae 3 (" in evaluation_line(last, first, constant, 7)
