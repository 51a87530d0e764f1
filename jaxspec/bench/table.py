"""Tables of results, as Markdown for the pages and for the terminal.

A column is its label, or (label, form), or (label, form, value). `form` is a format string or a function that returns
text; the default shows the value as it is. `value` is a key of the rows or a function of a row; the default is the
column's position in the row. What is not known, None and NaN, is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

Form = str | Callable[[Any], str]
Column = str | tuple[str, Form] | tuple[str, Form, Callable[[Any], Any] | str]

UNKNOWN = "–"
PERCENT, TIMES = "{:.1f} %", "{:.2f}×"


def shown(value: Any, form: Form = "{}") -> str:
    """The value in this form; a dash if it is None or NaN."""
    if value is None or (isinstance(value, float) and value != value):
        return UNKNOWN
    return form.format(value) if isinstance(form, str) else form(value)


def share(value: float) -> str:
    """A form: a share in per cent."""
    return PERCENT.format(100 * value)


def median(form: Form) -> Form:
    """A form: the median of several values."""
    return lambda values: shown(float(np.median(values)), form)


def spread(form: Form = PERCENT, ends: Form = "{:.0f}", middle: Callable[[Any], Any] = np.median) -> Form:
    """A form: the median (or another `middle`) and the range of several values; a dash if there are none."""

    def several(values: Sequence[float]) -> str:
        if not values:
            return UNKNOWN
        return f"{shown(middle(values), form)} ({shown(min(values), ends)} … {shown(max(values), ends)})"

    return several


def each(labels: Iterable[Any], form: Form = "{}") -> list[Column]:
    """A column of this form for every label."""
    return [(str(label), form) for label in labels]


def at(found: Any, *path: str) -> Any:
    """The value at the end of a path of keys; None if a part of the path is missing."""
    for key in path:
        found = (found or {}).get(key)
    return found


def walk(found: Mapping[str, Any], depth: int) -> Iterator[tuple[Any, ...]]:
    """The values `depth` levels down in nested mappings, each after the keys that lead to it."""
    for key, value in found.items():
        yield from [(key, value)] if depth == 1 else ((key, *rest) for rest in walk(value, depth - 1))


def cells(rows: Iterable[Any], columns: Sequence[Column]) -> Iterator[list[str]]:
    """The text of all cells by row. Raises ValueError if a row read by position has another number of values."""
    full = [(column,) if isinstance(column, str) else column for column in columns]
    by_position = all(len(column) < 3 for column in full)
    for row in rows:
        if by_position and len(row) != len(full):
            raise ValueError(f"{len(row)} values in a table of {len(full)} columns: {row}")
        yield [shown(_value(row, i, *column[2:]), *column[1:2]) for i, column in enumerate(full)]


def _value(row: Any, position: int, value: Any = None) -> Any:
    if callable(value):
        return value(row)
    return row[position if value is None else value]


def _label(column: Column) -> str:
    return column if isinstance(column, str) else column[0]


def markdown(rows: Iterable[Any], *columns: Column) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    header = [_label(column) for column in columns]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells(rows, columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal(rows: Iterable[Any], *columns: Column, left: int = 1, **options: Any) -> Table:
    """A table for a rich console; all but the first `left` columns are right-aligned. options: of `rich.table.Table`"""
    table = Table(**{"title_justify": "left", **options})
    for i, column in enumerate(columns):
        table.add_column(_label(column), justify="left" if i < left else "right")
    for line in cells(rows, columns):
        table.add_row(*map(Text, line))
    return table
