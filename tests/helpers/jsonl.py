"""Files of rows, and an LLM that can be interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.llm import LLM


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Lasting(LLM):
    """Stays open after its `with`: compiled once for the tests below."""

    def __exit__(self, *_: object) -> None:
        pass
