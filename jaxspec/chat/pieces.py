"""Pieces of an answer, as its text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """kind: what `text` is part of. call: a tool call begins, and `text` is the function's name. index: of the call."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may become `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
