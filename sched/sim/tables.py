"""CSV files with a heading: arrivals and lengths."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")
Given = TypeVar("Given")
Cells = Mapping[str, str | None]


def read(
    path: str | Path, reader: Callable[[Sequence[str]], Callable[[Cells], Row | None]], count: int | None = None
) -> list[Row]:
    """The first `count` rows as `reader(column names)` reads them, without those that are None.

    Raises OSError, or ValueError with the file, and the line, if `reader` refuses the columns or a row with a
    ValueError, or if it is no CSV.
    """
    found: list[Row] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            parse = _told(f"{path}", reader, rows.fieldnames or ())
            for row in rows:
                if len(found) == count:
                    break
                if (read := _told(f"{path}, line {rows.line_num}", parse, row)) is not None:
                    found.append(read)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.line_num + 1}: not a CSV file of UTF-8 text ({error})") from None
    return found


def needing(needed: Sequence[str], parse: Callable[[Cells], Row]) -> Callable[[Sequence[str]], Callable[[Cells], Row]]:
    """A reader for `read` of tables that have these columns."""

    def reader(names: Sequence[str]) -> Callable[[Cells], Row]:
        for name in needed:
            if name not in names:
                raise ValueError(f"no column {name}")
        return parse

    return reader


def _told(where: str, parse: Callable[[Given], Row], given: Given) -> Row:
    """`parse(given)`; its ValueErrors say where."""
    try:
        return parse(given)
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from None


def number(row: Cells, name: str, default: float = 0.0) -> float:
    """A cell as a number; `default` if it is empty. Raises ValueError for what is no finite number of 0 or more, and
    below 1e15, so that it is exact."""
    return as_number(text, name) if (text := row.get(name)) else default


def as_number(text: str, name: str = "a time") -> float:
    """A text as a number. Raises ValueError as `number` does."""
    value = float(text[:100])
    if not (isfinite(value) and 0 <= value < 1e15):
        raise ValueError(f"{name} must be a number from 0 to 1e15, not {text[:40]}")
    return value
