"""Texts by their n-grams: where the end of a text occurred before, and what followed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Lengths of the n-grams that find an earlier occurrence, longest first.
NGRAMS = (8, 4, 2)
#: Longest match that is told from longer ones. Bounds the work.
MAX_MATCH = 64
#: Occurrences of an n-gram that are looked at, latest first.
OCCURRENCES = 8
_SEPARATOR = -1


class Match(NamedTuple):
    """An earlier occurrence: the position of the token after it, and how many tokens it has in common with the end of
    the text."""

    position: int
    length: int


class SuffixIndex:
    """The last `capacity` tokens of texts, for SuffixDecoding (arXiv 2411.04975).

    It does the work of the paper's suffix tree: for each length in `NGRAMS` a hash table leads to the latest position
    after an n-gram, and every position to the one before. Adding a token costs three insertions, however much is known.
    Positions count all tokens ever added; those of forgotten tokens are not used.
    """

    def __init__(self, capacity: int, slots: int):
        """`slots`: of each hash table, a power of 2. N-grams that share one only cost time."""
        self._capacity, self._mask = capacity, slots - 1
        self._tokens = array("i")
        self._latest = [array("q", [-1]) * slots for _ in NGRAMS]
        self._before = [array("q") for _ in NGRAMS]
        self._recent: list[int] = []
        self._end = 0

    def __len__(self) -> int:
        """Tokens ever added, with one more for each text that has ended."""
        return self._end

    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens that are kept, oldest first, with -1 after each text that has ended."""
        start = self._end % self._capacity if self._end > self._capacity else 0
        return np.asarray(self._tokens[start:] + self._tokens[:start], np.int32)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current text."""
        for token in tokens:
            self._append(token)
            self._recent.append(token)
            if len(self._recent) > NGRAMS[0]:
                del self._recent[0]

    def end_text(self) -> None:
        """The next tokens begin another text."""
        self._append(_SEPARATOR)
        self._recent.clear()

    def _append(self, token: int) -> None:
        end, recent = self._end, self._recent
        place, full = end % self._capacity, end >= self._capacity
        if full:
            self._tokens[place] = token
        else:
            self._tokens.append(token)
        for n, latest, before in zip(NGRAMS, self._latest, self._before, strict=True):
            previous = -1
            if n <= len(recent):
                slot = hash(tuple(recent[-n:])) & self._mask
                previous, latest[slot] = latest[slot], end
            if full:
                before[place] = previous
            else:
                before.append(previous)
        self._end = end + 1

    def matches(self, text: Sequence[int], most: int, shortest: float = 0.0) -> list[Match]:
        """At most `most` earlier occurrences of the end of `text`, at least `shortest` tokens of it. The longest match
        comes first, then the latest.

        `text` may be the end of the current text, which then does not find itself.
        """
        oldest, found = max(0, self._end - self._capacity), dict[int, int]()
        longer = MAX_MATCH + 1  # the next longer n-gram finds what matches so far
        for n, latest, before in zip(NGRAMS, self._latest, self._before, strict=True):
            if n > len(text):
                continue
            if longer <= shortest:
                break
            longer = n
            at = latest[hash(tuple(text[-n:])) & self._mask]
            for _ in range(OCCURRENCES):
                if not oldest < at < self._end:
                    break
                if at not in found and (length := self._in_common(at, text, oldest)) >= max(n, shortest):
                    found[at] = length
                at, later = before[at % self._capacity], at
                if at >= later:
                    break  # overwritten
            if len(found) >= most:
                break
        return sorted((Match(*item) for item in found.items()), key=lambda m: (-m.length, -m.position))[:most]

    def _in_common(self, at: int, text: Sequence[int], oldest: int) -> int:
        tokens, capacity = self._tokens, self._capacity
        most = min(at - oldest, len(text), MAX_MATCH)
        for i in range(1, most + 1):
            if tokens[(at - i) % capacity] != text[-i]:
                return i - 1
        return most

    def following(self, position: int, count: int) -> list[int]:
        """At most `count` tokens from `position` to the end of their text.

        What reaches the end of the current text goes on with itself: a periodic text continues with its period.
        """
        period, place = self._end - position, position % self._capacity
        known = min(count, period)
        out = self._tokens[place : place + known].tolist()
        out += self._tokens[: known - len(out)].tolist()  # beyond the end of the ring
        if _SEPARATOR in out:
            return out[: out.index(_SEPARATOR)]
        return [out[i % period] for i in range(count)] if period < count else out
