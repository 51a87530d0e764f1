"""What became of the predictions that were asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PredictionCounts:
    """`made` predictions of lengths, `late` ones whose request had ended by then, requests that went `without` because
    too many waited or the predictor failed, and the seconds that the predictor took, learning included."""

    made: int = 0
    late: int = 0
    without: int = 0
    seconds: float = 0.0
