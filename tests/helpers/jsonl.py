"""JSON Lines files, and an `LLM` that several tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.llm import LLM


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Lasting(LLM):
    """An `LLM` whose `with` block does not close it, so that several runs share one compiled engine."""

    def __exit__(self, *_: object) -> None:
        pass
