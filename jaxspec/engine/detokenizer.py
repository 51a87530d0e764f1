"""Incremental detokenization: never an incomplete character, never text that may belong to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


class Pushed(NamedTuple):
    """Result of `Detokenizer.push`: new text, the stop string that ended it, and how many tokens were consumed.

    Tokens after the one that completes a stop string are not consumed.
    """

    text: str
    stop: str | None
    consumed: int


class Detokenizer:
    """The text of one sequence, in deltas whose concatenation is `tokenizer.decode` of all its ids.

    It holds back the bytes of an incomplete character and the longest suffix that could begin a stop string. The stop
    string that is complete first wins (the longer one, if two end together), so the result does not depend on how the
    text is split into tokens. `include_stop` keeps the stop string in the text. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._matchers = [_Matcher(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._at_start = True
        self._stop: str | None = None
        self._min_tokens, self._pushed = min_tokens, 0

    def push(self, token_ids: Iterable[int]) -> Pushed:
        """Append tokens. After a stop string, tokens are ignored."""
        out: list[str] = []
        consumed = 0
        for id in token_ids:
            if self._stop is not None:
                break
            consumed += 1
            self._pushed += 1
            if id not in self._skipped:
                out.append(self._add(self._decoder.decode(self._bytes(id))))
        return Pushed("".join(out), self._stop, consumed)

    def finish(self) -> str:
        """The text still held back, when no token follows. An incomplete character becomes U+FFFD."""
        if self._stop is not None:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _bytes(self, id: int) -> bytes:
        raw = self._tokenizer.token_bytes(id)
        if self._at_start and raw:
            self._at_start = False
            # Some tokenizers drop the space before the first word: compare with what decode gives.
            spaces = len(raw) - len(raw.lstrip(b" "))
            shown = self._tokenizer.decode([id], self._skip_special_tokens) if spaces else ""
            return raw[max(0, spaces - (len(shown) - len(shown.lstrip(" ")))) :]
        return raw

    def _add(self, text: str) -> str:
        """Append decoded text. -> what is safe to output. Sets `_stop` when a stop string is complete."""
        if not self._matchers:
            return text
        begun = len(self._held)
        text = self._held + text
        for end in range(begun, len(text)):
            # Not a generator in any(): every matcher must see the character.
            hits = [m.stop for m in self._matchers if m.step(text[end])]
            if hits and self._pushed > self._min_tokens:
                self._stop, self._held = hits[0], ""
                return text[: end + 1] if self._include_stop else text[: end + 1 - len(hits[0])]
        safe = len(text) - max(m.matched for m in self._matchers)
        self._held = text[safe:]
        return text[:safe]


class _Matcher:
    """Knuth-Morris-Pratt for one stop string. `matched`: length of its prefix that the text ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        #: _fallback[i]: length of the longest proper suffix of stop[:i + 1] that is a prefix of stop.
        self._fallback = [0] * len(stop)
        for i in range(1, len(stop)):
            self._fallback[i] = self._next(self._fallback[i - 1], stop[i])

    def step(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.stop)

    def _next(self, matched: int, char: str) -> int:
        if matched == len(self.stop):  # complete, and did not end the text
            matched = self._fallback[-1]
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0
