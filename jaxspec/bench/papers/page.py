"""A paper's page: generated tables between marks in a hand-written Markdown file, and the JSON file of the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.report import write_json


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(path: Path, title: str, sections: Mapping[str, str]) -> None:
    """Write each section between its marks in the file at `path`; sections without marks are appended.

    A missing file is created with the heading `title`.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n"
    for name, content in sections.items():
        marked = f"<!-- {name} -->\n{content}\n<!-- end of {name} -->"
        text, found = re.subn(
            rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, new=marked: new, text, flags=re.DOTALL
        )
        if not found:
            text = f"{text.rstrip()}\n\n{marked}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def keep(path: Path, kind: str, numbers: dict[str, Any], copy: str | None) -> dict[str, Any]:
    """Merge `numbers` as `kind` ("simulated", "engine", …) into the file at `path`, and return all of them.

    copy: path of a second file with all numbers. Raises `BenchError` if the file is not JSON.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise BenchError(f"{path} does not hold an earlier run's numbers: {error}") from None
    kept[kind] = json.loads(json.dumps(numbers))  # keys become text, as when read from the file
    write_json(path, kept)
    if copy:
        write_json(copy, kept)
    return kept


def spread(turns: Sequence[float] | None, form: str = "{:.1f} %", ends: str = "{:.0f}") -> str:
    """Median and range over the turns."""
    if not turns:
        return "–"
    return f"{form.format(np.median(turns))} ({ends.format(min(turns))} … {ends.format(max(turns))})"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"
