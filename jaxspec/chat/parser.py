"""An answer's text as pieces: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxspec.chat.pieces import Piece
from jaxspec.chat.reasoning import Reasoning, ReasoningSplitter
from jaxspec.chat.tool_parser import ToolParser


class ChatParser:
    """Parses one answer while it is generated.

    reasoning: how the answer begins; None: it has no reasoning part. tools: None if it may not call any. bytes_of: of
    a token.
    """

    def __init__(
        self,
        reasoning: Reasoning | None,
        tools: ToolParser | None,
        bytes_of: Callable[[int], bytes],
    ):
        self._splitter = ReasoningSplitter(reasoning) if reasoning else None
        self._end = reasoning.end.encode() if reasoning else b""
        self._tools, self._bytes_of = tools, bytes_of
        self._tail, self._counting = b"", reasoning is not None
        self._reasoning_tokens = 0

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._tools.calls if self._tools else 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, with its tags; 0 if the answer has none."""
        thought = self._splitter is not None and self._splitter.found
        return self._reasoning_tokens if thought else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """The pieces that `text` completes. `token_ids`: new tokens, whose text may come later."""
        self._count(token_ids)
        return self._with_calls(self._splitter.feed(text) if self._splitter else [Piece("content", text)])

    def finish(self) -> list[Piece]:
        """The last pieces, when no text follows."""
        out = self._with_calls(self._splitter.finish()) if self._splitter else []
        return out + (self._tools.finish() if self._tools else [])

    def _with_calls(self, pieces: Sequence[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += self._tools.feed(piece.text) if self._tools and piece.kind == "content" else [piece]
        return out

    def _count(self, token_ids: Sequence[int]) -> None:
        for id in token_ids:
            if not self._counting:
                return
            self._reasoning_tokens += 1
            text = self._tail + self._bytes_of(id)
            self._counting, self._tail = self._end not in text, text[-len(self._end) :]
