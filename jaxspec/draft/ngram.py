"""N-gram lookup: drafts for text that repeats itself, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates

#: Longest match that is told from longer ones. Bounds the work; almost all that match further are right (99.9 %).
MAX_MATCH = 64
#: A token that continues a match of n tokens is stated to be right with probability n / (n + this). Fitted to 500
#: greedy answers of SmolLM2-135M: 52, 63, 71, 78, 84, 92 and 96 % are right for n = 2, 3, 4, 6, 8, 16 and 32, at
#: whatever level of the draft, because a draft token that is right makes the match of the next one longer.
_DOUBT = 1.6


class NGramIndex:
    """Prompt lookup decoding (Saxena 2023), also called n-gram speculation, for one request.

    Searches the earlier tokens for the last n tokens, longest n first, to copy what followed their most recent earlier
    occurrence. All n-grams are in a dictionary: per n, a new token costs one insertion and a search one lookup, however
    long the text is.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams from {shortest} to {longest} tokens: expected 1 <= shortest <= longest")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> index of the token after its latest occurrence. The n-gram that ends the text is inserted with the
        # next token, so looking up the end of the text finds earlier occurrences only.
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Number of known tokens."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens: the prompt first, then each step's new ones."""
        known, after = self._tokens, self._after
        for token in tokens:
            end = len(known)
            for n in self._lengths:
                if n <= end:
                    after[tuple(known[end - n :])] = end
            known.append(token)

    def copy(self, start: int, count: int) -> list[int]:
        """`count` tokens from index `start` on.

        A copy that reaches the end of the known tokens continues with its own tokens, so a periodic text is continued
        with its period.
        """
        period = len(self._tokens) - start
        return [self._tokens[start + i % period] for i in range(count)]

    def match(self) -> tuple[int, int] | None:
        """Index of the token after the occurrence to copy from, and the number of tokens, at most `MAX_MATCH`, that it
        has in common with the end of the text; None if no n-gram matches.

        That number may exceed the longest n: n-grams find the occurrence, all its tokens say how much to trust it.
        """
        known = self._tokens
        end = len(known)
        for n in self._lengths:
            if n <= end and (start := self._after.get(tuple(known[end - n :]))) is not None:
                most = min(start, MAX_MATCH)
                while n < most and known[start - n - 1] == known[end - n - 1]:
                    n += 1
                return start, n
        return None


class NgramDrafter(SharedDevice):
    """Proposes what followed an earlier occurrence of the request's last tokens."""

    name, widths = "ngram", (1,)

    def __init__(self) -> None:
        self._indexes = PerRequest(lambda request: NGramIndex())

    def uncached_tokens(self, request: Request) -> int:
        return 0

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        candidates: list[Candidates | None] = [self._candidates(s.request, levels) for s in scheduled]
        return lambda: candidates

    def _candidates(self, request: Request, levels: int) -> Candidates:
        index = self._indexes.of(request)
        index.extend(request.tokens[len(index) :])
        if (found := index.match()) is None:
            return Candidates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
        start, length = found
        level = np.arange(levels, dtype=np.int32)
        matched = length + level  # before each token, if those above it are right
        logprob = np.cumsum(np.log(matched / (matched + _DOUBT))).astype(np.float32)
        return Candidates(np.asarray(index.copy(start, levels), np.int32), level - 1, logprob)

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 5e-6 * requests
