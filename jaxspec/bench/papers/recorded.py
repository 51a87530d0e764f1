"""Answers with what predictors said of their lengths, from `jaxspec.train_predictor.predictions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.sched.request import Request
from jaxspec.sched.sim import json_lines
from jaxspec.sched.sim.workload import Lengths

#: The ways to predict at arrival, as the file's fields are called.
NAMES = ("proxy", "retrieval", "blend")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A table to draw requests from.

    lengths    prompts' and answers' tokens `[rows]`, without a prediction
    predicted  by name of the predictor, tokens `[rows]` at arrival
    every      tokens between two values of the length probe
    left       for each row, tokens that the probe expects after `every`, 2 `every`, … tokens; empty if not recorded
    """

    lengths: Lengths
    predicted: Mapping[str, np.ndarray]
    every: int
    left: Sequence[Sequence[float]]

    def probe(self, rows: np.ndarray) -> Callable[[Request], float]:
        """The probe of requests whose ids are indices of `rows`, which are rows of this table."""

        def left(request: Request) -> float:
            values = self.left[int(rows[int(request.id)])]
            at = min(request.output_len // self.every, len(values))
            if not at:  # so short that the probe was never asked
                return 1.0
            return max(values[at - 1] - (request.output_len - at * self.every), 1.0)

        return left


def read(path: str | Path) -> Recorded:
    """Read a file. Raises OSError, or ValueError naming the line that is wrong."""

    def parse(row: Any) -> tuple[list[float], int, list[float]]:
        numbers = [float(row[name]) for name in ("input_tokens", "output_tokens", *NAMES)]
        if min(numbers) < 1:
            raise ValueError("lengths must be at least 1")
        return numbers, int(row.get("every", 0)), [float(value) for value in row.get("left", [])]

    rows = json_lines.read(path, parse, f"input_tokens, output_tokens and {', '.join(NAMES)}")
    if not rows:
        raise ValueError(f"{path}: no rows")
    if len({every for _, every, _ in rows}) > 1:
        raise ValueError(f"{path}: its rows differ in how often the probe was asked")
    inputs, outputs, *predicted = np.array([numbers for numbers, _, _ in rows]).T
    lengths = Lengths(inputs.astype(int), outputs.astype(int), np.full(len(rows), np.nan))
    return Recorded(lengths, dict(zip(NAMES, predicted, strict=True)), rows[0][1], [left for _, _, left in rows])
