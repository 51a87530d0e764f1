"""Workloads of the simulator: arrivals joined with lengths and predictions, one array row per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import numpy as np

from jaxspec.sched.sim import json_lines, tables
from jaxspec.sched.sim.arrivals import BLOCK_TOKENS, Arrival
from jaxspec.sched.sim.prompts import Prompts
from jaxspec.sched.slo import NONE, Slo

#: Approximate characters per token of English text and code with a LLaMA-like vocabulary.
CHARACTERS_PER_TOKEN = 4.0
#: `max_tokens` of requests for which a workload gives none.
MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Table of lengths in tokens to draw requests from, `[rows]` each; `predicted` is NaN without a prediction."""

    input: np.ndarray
    output: np.ndarray
    predicted: np.ndarray

    def __len__(self) -> int:
        return len(self.output)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to serve; arrays are `[requests]`.

    arrival: seconds, ascending; input, output: tokens; predicted: output tokens, NaN without a prediction; tpot: the
    TPOT SLO in seconds, NaN without one; max_tokens: its limit, at least `output`; None: `MAX_TOKENS` for all; prompts:
    what they share; None: nothing is known of it. Raises `ValueError` naming the invalid array.
    """

    arrival: np.ndarray
    input: np.ndarray
    output: np.ndarray
    predicted: np.ndarray
    tpot: np.ndarray | None = None
    max_tokens: np.ndarray | None = None
    prompts: Prompts | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "predicted", "tpot", "max_tokens"):
            column = getattr(self, name)
            if column is not None and column.shape != self.arrival.shape:
                raise ValueError(f"{name} has {column.size} rows for {self.arrival.size} arrivals")
        if self.arrival.size and (np.diff(self.arrival) < 0).any():
            raise ValueError("arrival must be ascending")
        for name in ("input", "output"):
            if self.arrival.size and getattr(self, name).min() < 1:
                raise ValueError(f"{name} must be at least one token for every request")
        if self.max_tokens is not None and (self.max_tokens < self.output).any():
            raise ValueError("max_tokens must be at least output for every request")
        if self.prompts is not None and len(self.prompts) != len(self):
            raise ValueError(f"prompts has {len(self.prompts)} rows for {len(self)} arrivals")

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def slos(self) -> list[Slo] | None:
        """The SLO of each request; None if the workload has none."""
        if self.tpot is None:
            return None
        return [NONE if isnan(seconds) else Slo(tpot=seconds) for seconds in self.tpot.tolist()]

    @property
    def caps(self) -> np.ndarray:
        """`max_tokens` of each request `[requests]`; without one, `MAX_TOKENS`, or its output if that is longer."""
        return np.maximum(self.output, MAX_TOKENS) if self.max_tokens is None else self.max_tokens

    def cut(self, max_tokens: int) -> Workload:
        """A copy in which all requests have this `max_tokens`; longer outputs end there."""
        most = np.full(len(self), max_tokens)
        return replace(self, output=np.minimum(self.output, most), max_tokens=most)

    def predict(self, predicted: np.ndarray) -> Workload:
        """A copy with other predictions `[requests]`."""
        return replace(self, predicted=np.asarray(predicted, float))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Log-normal output lengths for arrivals without lengths: `median` tokens, standard deviation `sigma` of the
    logarithm, at most `most` tokens.

    The defaults have a mean of 190 tokens, close to a public trace of conversations (Azure 2023: median 120, mean 205).
    """

    median: float = 128.0
    sigma: float = 0.9
    most: int = 1024

    def draw(self, arrivals: Sequence[Arrival], rng: np.random.Generator) -> list[Arrival]:
        """The arrivals with drawn `output_tokens`."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(len(arrivals)))
        lengths = np.clip(np.rint(drawn), 1, self.most).astype(int).tolist()
        return [replace(a, output_tokens=n) for a, n in zip(arrivals, lengths, strict=True)]


def join(arrivals: Sequence[Arrival], lengths: Lengths | None, input_tokens: int, rng: np.random.Generator) -> Workload:
    """A workload with one request per arrival.

    Lengths are drawn from `lengths`, whole rows with replacement. Without a table they are the arrivals' own, and so
    are the blocks of their prompts. `input_tokens` replaces missing input lengths (0 in the table). Raises ValueError
    if an output length is missing.
    """
    times = np.array([a.time for a in arrivals], float)
    if lengths is not None:
        rows = rng.integers(len(lengths), size=len(arrivals))
        inputs = lengths.input[rows]
        return Workload(
            times, np.where(inputs > 0, inputs, input_tokens), lengths.output[rows], lengths.predicted[rows]
        )
    if any(a.output_tokens is None for a in arrivals):
        raise ValueError("not every arrival has output_tokens: fill the column, or give a table of lengths")
    # Traces contain requests with an empty answer; here every request generates at least one token.
    inputs = np.array([a.input_tokens or input_tokens for a in arrivals])
    outputs = np.array([max(1, a.output_tokens or 1) for a in arrivals])
    blocks = [a.blocks for a in arrivals if a.blocks is not None]
    prompts = Prompts(blocks, BLOCK_TOKENS) if blocks and len(blocks) == len(arrivals) else None
    return Workload(times, inputs, outputs, np.full(len(arrivals), np.nan), prompts=prompts)


def read_lengths(path: str | Path, prediction: str | None = None) -> Lengths:
    """Lengths from a table: a CSV file with the column output_tokens, or a .jsonl file (see `read_jsonl`).

    `prediction` names the CSV's column of predicted lengths. If that name contains "class", its values are classes, and
    each becomes the mean true length of its rows. Raises OSError, or ValueError naming the line or column that is
    wrong.
    """
    if Path(path).suffix == ".jsonl":
        if prediction is not None:
            raise ValueError(f"{path}: a JSONL file has no column {prediction}")
        return read_jsonl(path)
    wanted = ["output_tokens", *([prediction] if prediction else [])]
    names = ["input_tokens", *wanted]
    rows = tables.read(path, tables.needing(wanted, lambda row: [tables.number(row, name) for name in names]))
    if not rows:
        raise ValueError(f"{path}: no rows")
    columns = np.array(rows, float)
    inputs, output = columns[:, 0].astype(int), columns[:, 1].astype(int)
    predicted = columns[:, 2] if prediction else np.full(output.shape, np.nan)
    if prediction and "class" in prediction:
        predicted = class_means(predicted, output)
    kept = output > 0
    return Lengths(inputs[kept], output[kept], predicted[kept])


def read_jsonl(path: str | Path) -> Lengths:
    """Lengths of texts at four characters per token, from lines with `turns`, a list whose first text is the prompt,
    and the answer `reference`; lines without an answer are skipped. Raises OSError or ValueError."""
    texts = json_lines.read(path, lambda row: (row["turns"][0], row.get("reference")))
    rows = [both for both in texts if all(isinstance(text, str) for text in both) and both[1]]
    if not rows:
        raise ValueError(f"{path}: no line has a 'reference', the answer to take the length from")
    sizes = np.array([[len(text) for text in both] for both in rows])
    inputs, outputs = np.maximum(1, np.round(sizes / CHARACTERS_PER_TOKEN)).astype(int).T
    return Lengths(inputs, outputs, np.full(len(rows), np.nan))


def class_means(classes: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Predicted classes `[rows]` as lengths: for each row the mean true length of the rows with its class."""
    _, index = np.unique(classes, return_inverse=True)
    return (np.bincount(index, output) / np.bincount(index))[index]


def noisy(output: np.ndarray, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Predictions with a log-normal error factor; `sigma` is the RMS error of the logarithm."""
    return output * np.exp(rng.normal(0.0, sigma, output.shape))


def class_accuracy(predicted: np.ndarray, output: np.ndarray, bounds: Sequence[float]) -> float:
    """Share of predicted lengths in the same class as the true ones; `bounds` separate the classes."""
    return float((np.digitize(predicted, bounds) == np.digitize(output, bounds)).mean())


def noise_of_accuracy(output: np.ndarray, accuracy: float, bounds: Sequence[float], rng: np.random.Generator) -> float:
    """The `sigma` at which `noisy` predictions reach this class accuracy, by bisection on one set of draws."""
    draws = rng.normal(size=output.shape)
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        right = class_accuracy(output * np.exp(middle * draws), output, bounds) > accuracy
        low, high = (middle, high) if right else (low, middle)
    return (low + high) / 2
