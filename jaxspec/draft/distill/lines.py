"""Files of one JSON object a line (JSONL), also while another process writes them or after it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; blank lines, and a last line that was cut off, are left out.

    Raises `OSError`, and `ValueError` naming the file and the line.
    """
    with path.open("rb") as file:  # bytes: a cut can go through a character
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise ValueError(f"{path}, line {number}: not JSON") from None
                return  # a prefix of an object is never JSON itself
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def check_readable(paths: Sequence[str]) -> None:
    """Better to hear of a file that is not there before a model is loaded for it. Raises `OSError`."""
    for path in paths:
        with Path(path).open("rb"):
            pass


def mend(path: Path) -> None:
    """Cut a file off after its last complete line, so that more can be appended."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
