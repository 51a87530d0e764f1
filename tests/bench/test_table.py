"""Tables: what cells show, and how rows are read."""

from __future__ import annotations

import pytest
from rich.console import Console

from jaxspec.bench.table import PERCENT, TIMES, at, each, markdown, median, share, shown, spread, terminal, walk


def test_cells_show_values_in_the_form_of_their_column() -> None:
    rows = [["a", 1.25, [3.0, 1.0, 2.0]], ["b", None, []], ["c", float("nan"), [4.0]]]
    assert markdown(rows, "name", ("ratio", TIMES), ("turns", spread())).splitlines() == [
        "| name | ratio | turns |", "| --- | ---: | ---: |", "| a | 1.25× | 2.0 % (1 … 3) |", "| b | – | – |",
        "| c | – | 4.0 % (4 … 4) |",
    ]  # fmt: skip
    assert shown(0.125, share) == shown(12.5, PERCENT) == "12.5 %"
    assert shown([1.0, 2.0, 9.0], median("{:.0f}")) == "2"


def test_rows_are_read_by_position_by_key_or_by_a_function() -> None:
    rows = [{"speed": 3, "tokens": [1, 2]}]
    columns = ("speed", "{:.1f}", "speed"), ("tokens", "{}", lambda row: len(row["tokens"]))
    assert markdown(rows, *columns).endswith("| 3.0 | 2 |")
    with pytest.raises(ValueError, match="1 values in a table of 2 columns"):
        markdown([["a"]], "a", *each(["b"]))


def test_nested_results() -> None:
    nested = {"a": {"x": 1, "y": 2}, "b": {"x": 3}}
    assert list(walk(nested, 2)) == [("a", "x", 1), ("a", "y", 2), ("b", "x", 3)]
    assert (at(nested, "a", "y"), at(nested, "b", "y"), at(None, "a", "x")) == (2, None, None)


def test_the_terminal_aligns_numbers_to_the_right_and_takes_names_as_they_are() -> None:
    console = Console(width=60, record=True)
    console.print(terminal([["[red]a", "x", 5]], "name", "kind", "number", left=2))
    assert "│ [red]a │ x    │      5 │" in console.export_text()
