"""Token ids to text, a token at a time: never a cut character, nothing that may yet belong to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer


class Pushed(NamedTuple):
    """What `Detokenizer.push` gave: new text, the stop string that ended it, and how many of the tokens count.

    All tokens count unless a stop string ended the text: then those after the token that completed it do not.
    """

    text: str
    stop: str | None
    consumed: int


class Detokenizer:
    """The text of one sequence, in deltas whose concatenation is `tokenizer.decode` of all its ids.

    Held back are the bytes of an unfinished character and the longest end of the text that could begin a stop string.
    Of several stop strings the one that is complete first wins (the longer one, if they end together), so the result
    does not depend on how the text is cut into tokens. `include_stop` keeps the stop string in the text. Bytes that
    are no UTF-8 become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
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

    def push(self, token_ids: Iterable[int]) -> Pushed:
        """Add tokens. After a stop string nothing is added any more."""
        out: list[str] = []
        consumed = 0
        for id in token_ids:
            if self._stop is not None:
                break
            consumed += 1
            if id not in self._skipped:
                out.append(self._add(self._decoder.decode(self._bytes(id))))
        return Pushed("".join(out), self._stop, consumed)

    def finish(self) -> str:
        """The text still held back, once no token follows; an unfinished character in it is U+FFFD."""
        if self._stop is not None:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _bytes(self, id: int) -> bytes:
        raw = self._tokenizer.token_bytes(id)
        if self._at_start and raw:
            self._at_start = False
            # Vocabularies that write a space before every word have one dropped at the start. Ask, don't guess.
            spaces = len(raw) - len(raw.lstrip(b" "))
            shown = self._tokenizer.decode([id], self._skip_special_tokens) if spaces else ""
            return raw[max(0, spaces - (len(shown) - len(shown.lstrip(" ")))) :]
        return raw

    def _add(self, text: str) -> str:
        """Take in decoded text and return what is safe to show; sets `_stop` when a stop string is complete."""
        if not self._matchers:
            return text
        begun = len(self._held)
        text = self._held + text
        for end in range(begun, len(text)):
            # Not a generator in any(): every matcher must see the character.
            hits = [m.stop for m in self._matchers if m.step(text[end])]
            if hits:
                self._stop, self._held = hits[0], ""
                return text[: end + 1] if self._include_stop else text[: end + 1 - len(hits[0])]
        safe = len(text) - max(m.matched for m in self._matchers)
        self._held = text[safe:]
        return text[:safe]


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: `matched` is how much of its beginning the text now ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        #: _fallback[i]: length of the longest proper end of stop[:i + 1] that stop begins with.
        self._fallback = [0] * len(stop)
        for i in range(1, len(stop)):
            self._fallback[i] = self._next(self._fallback[i - 1], stop[i])

    def step(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.stop)

    def _next(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0
