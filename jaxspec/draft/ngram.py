"""Drafting without a model: text that repeats itself is looked up in itself."""

from __future__ import annotations

from collections.abc import Iterable


class NGramIndex:
    """Prompt lookup decoding (Saxena 2023), also called n-gram speculation, for one request.

    The last n known tokens are searched for among the tokens before them, the longest n first, and what followed their
    most recent earlier occurrence is proposed. Every n-gram is kept in a dictionary, so a token costs one insertion per
    n however long the text is, and a proposal costs one look-up per n.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams from {shortest} to {longest} tokens: expected 1 <= shortest <= longest")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # Where the text went on after the latest occurrence of each n-gram. One that ends the text has not gone on yet:
        # it is entered when the next token comes, so that a look-up of the text's end finds earlier occurrences only.
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Number of known tokens."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append known tokens: the prompt at first, then what each step accepted."""
        known, after = self._tokens, self._after
        for token in tokens:
            end = len(known)
            for n in self._lengths:
                if n <= end:
                    after[tuple(known[end - n :])] = end
            known.append(token)

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens to follow the known ones: all of them if anything matches, else none.

        Where the copy reaches the end of the known tokens it goes on with what it has proposed itself, so a text that
        repeats a period is continued with that period.
        """
        known = self._tokens
        end = len(known)
        for n in self._lengths:
            if n > end:
                continue
            start = self._after.get(tuple(known[end - n :]))
            if start is not None:
                period = end - start
                return [known[start + i % period] for i in range(count)]
        return []
