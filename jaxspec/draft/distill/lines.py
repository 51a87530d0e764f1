"""Reads JSONL files whose last line may be incomplete, because their writer is still at work or was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file. Blank lines and an incomplete last line are skipped.

    Raises `OSError`, and `ValueError` naming the file and the line.
    """
    with path.open("rb") as file:  # bytes, because the cut may split a character
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                return  # incomplete last line: a proper prefix of a JSON object is never valid JSON
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def check_readable(paths: Sequence[str]) -> None:
    """Raises `OSError` for a file that cannot be opened, so that this is reported before a model is loaded."""
    for path in paths:
        with Path(path).open("rb"):
            pass


def mend(path: Path) -> None:
    """Truncate a file after its last complete line, so that rows can be appended."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
