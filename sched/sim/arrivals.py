"""Arrival processes: Poisson, Gamma, a recorded trace, or all at once. The caller passes the random generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.sched.sim import json_lines, tables

#: Tokens of a block in traces with block ids (Mooncake's `hash_ids`).
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival time in seconds after the start, and what else the trace gives: lengths in tokens, ids of the prompt's
    blocks of `BLOCK_TOKENS` tokens."""

    time: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    blocks: tuple[int, ...] | None = None


def burst(count: int) -> list[Arrival]:
    """All requests at time 0; with a concurrency limit this is a closed loop."""
    return [Arrival(0.0)] * count


def gamma(count: int, rate: float, cv: float, rng: np.random.Generator) -> list[Arrival]:
    """Gamma-distributed gaps with mean 1/`rate` seconds and coefficient of variation `cv`; the first request is at 0.

    `cv` = 1 is a Poisson process, above 1 is burstier, 0 gives equal gaps. Raises ValueError for a rate that is not
    positive or a negative `cv`.
    """
    if not rate > 0 or not cv >= 0:
        raise ValueError(f"rate must be positive and burstiness (cv) not negative, got {rate} and {cv}")
    if cv == 0:
        gaps = np.full(max(count - 1, 0), 1 / rate)
    else:
        shape = 1 / cv**2
        gaps = rng.gamma(shape, 1 / (rate * shape), size=max(count - 1, 0))
    return [Arrival(float(t)) for t in np.concatenate([[0.0], np.cumsum(gaps)])[:count]]


def poisson(count: int, rate: float, rng: np.random.Generator) -> list[Arrival]:
    """A Poisson process with `rate` requests per second."""
    return gamma(count, rate, 1.0, rng)


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of a CSV's columns. `lengths`: input and output tokens; may be missing if `optional`. `seconds` reads a
    time. `skip_failed`: rows with 0 output tokens are requests that failed, and left out."""

    time: str
    lengths: tuple[str, str]
    optional: bool = False
    seconds: Callable[[str], float] = tables.as_number
    skip_failed: bool = False


def _timestamp(text: str) -> float:
    """Seconds since 1970 of a date and a time, in UTC unless it says otherwise; digits after microseconds are cut."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


#: The project's own columns, Azure's and BurstGPT's.
FORMATS = (
    Columns("arrival_s", ("input_tokens", "output_tokens"), optional=True),
    Columns("TIMESTAMP", ("ContextTokens", "GeneratedTokens"), seconds=_timestamp),
    Columns("Timestamp", ("Request tokens", "Response tokens"), skip_failed=True),
)
_ACCEPTED = (
    "arrival_s and optionally input_tokens, output_tokens; TIMESTAMP, ContextTokens, GeneratedTokens (Azure); "
    "Timestamp, Request tokens, Response tokens (BurstGPT); or a .jsonl file in Mooncake's format"
)


def trace(path: str | Path, count: int | None = None, rate: float | None = None) -> list[Arrival]:
    """The first `count` requests of a CSV with the columns of one of `FORMATS`, or of a .jsonl file in Mooncake's
    format (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`).

    Times are shifted to start at 0. With `rate` they are scaled to that mean rate (requests per second).
    Raises OSError, or ValueError naming the bad line, or the columns that are accepted.
    """
    if Path(path).suffix == ".jsonl":
        arrivals = json_lines.read(path, _with_blocks, "timestamp, input_length, output_length and hash_ids")[:count]
    else:
        arrivals = tables.read(path, _reader, count)
    if not arrivals:
        raise ValueError(f"{path}: no rows")
    arrivals.sort(key=lambda a: a.time)
    start, span = arrivals[0].time, arrivals[-1].time - arrivals[0].time
    stretch = (len(arrivals) - 1) / (rate * span) if rate and span > 0 else 1.0
    return [replace(a, time=(a.time - start) * stretch) for a in arrivals]


def _reader(names: Sequence[str]) -> Callable[[tables.Cells], Arrival | None]:
    """What reads the rows of a table with these columns."""
    columns = next((c for c in FORMATS if c.time in names), None)
    if columns is None or not (columns.optional or {*columns.lengths} <= {*names}):
        raise ValueError(f"it has the columns {', '.join(names) or 'of an empty file'}; accepted are {_ACCEPTED}")

    def read(row: tables.Cells) -> Arrival | None:
        inputs, outputs = (int(tables.number(row, name)) if row.get(name) else None for name in columns.lengths)
        if not outputs and columns.skip_failed:
            return None
        if not (time := row.get(columns.time)):
            raise ValueError(f"{columns.time} is empty")
        return Arrival(columns.seconds(time[:100]), inputs, outputs)

    return read


def _with_blocks(row: Any) -> Arrival:
    blocks = tuple(int(block) for block in row["hash_ids"])
    return Arrival(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


def part(arrivals: Sequence[Arrival], count: int, rate: float, rng: np.random.Generator) -> list[Arrival]:
    """`count` arrivals from a random place of a trace on, scaled to `rate` requests per second; the first is at 0.

    A trace that is too short is repeated. Raises ValueError for fewer than two arrivals or a rate that is not positive.
    """
    if len(arrivals) < 2 or not rate > 0:
        raise ValueError(f"expected two arrivals or more and a positive rate, got {len(arrivals)} and {rate}")
    rows = (int(rng.integers(len(arrivals))) + np.arange(count)) % len(arrivals)
    times = np.array([a.time for a in arrivals])
    gaps = np.append(np.diff(times), np.diff(times).mean())[rows]  # the last one leads back to the start
    starts = np.concatenate([[0.0], np.cumsum(gaps[:-1])])
    span = starts[-1]
    scale = (count - 1) / (rate * span) if span > 0 else 1.0
    return [replace(arrivals[i], time=float(t)) for i, t in zip(rows.tolist(), scale * starts, strict=True)]
