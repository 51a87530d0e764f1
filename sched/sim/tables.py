"""CSV files with a heading: arrivals and lengths."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")
Cells = Mapping[str, str | None]


def read(path: str | Path, parse: Callable[[Cells], Row], needed: Sequence[str], count: int | None = None) -> list[Row]:
    """`parse(cells)` of the first `count` rows.

    Raises OSError, or ValueError naming a column of `needed` that is missing, or the line that `parse` refuses with a
    ValueError or that is no CSV.
    """
    found: list[Row] = []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            for name in needed:
                if name not in (rows.fieldnames or ()):
                    raise ValueError(f"{path}: no column {name}")
            for row in rows:
                if len(found) == count:
                    break
                found.append(_parsed(path, rows.line_num, parse, row))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.line_num + 1}: not a CSV file of UTF-8 text ({error})") from None
    return found


def _parsed(path: str | Path, line: int, parse: Callable[[Cells], Row], row: Cells) -> Row:
    try:
        return parse(row)
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}") from None


def number(row: Cells, name: str, default: float = 0.0) -> float:
    """A cell as a number; `default` if it is empty. Raises ValueError for what is no finite number of 0 or more, and
    below 1e15, so that it is exact."""
    text = row.get(name)
    if not text:
        return default
    value = float(text[:100])
    if not (isfinite(value) and 0 <= value < 1e15):
        raise ValueError(f"{name} must be a number from 0 to 1e15, not {text[:40]}")
    return value
