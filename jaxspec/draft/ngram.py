"""N-gram lookup: drafts for text that repeats itself, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

import numpy as np

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates


class NGramIndex:
    """Prompt lookup decoding (Saxena 2023), also called n-gram speculation, for one request.

    Searches the earlier tokens for the last n tokens, longest n first, and proposes what followed their most recent
    earlier occurrence. All n-grams are in a dictionary: per n, a new token costs one insertion and a proposal one
    lookup, however long the text is.
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

    def propose(self, count: int) -> list[int]:
        """`count` tokens to follow the known ones if an n-gram matches, else none.

        A copy that reaches the end of the known tokens continues with its own proposal, so a periodic text is
        continued with its period.
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
        token = np.asarray(index.propose(levels), np.int32)
        level = np.arange(len(token), dtype=np.int32)
        # A lookup gives no probabilities. 0.5 per level is a placeholder, which calibration corrects.
        return Candidates(token, level - 1, ((level + 1) * log(0.5)).astype(np.float32))

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 5e-6 * requests
