"""Who gets which drafter, where that is known to be worth so and so much: maximum-weight matching (SPIN Eq. 10-12)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain, combinations

import numpy as np
from scipy.optimize import linear_sum_assignment


def match(gains: np.ndarray, limits: Sequence[int]) -> list[int | None]:
    """The drafter of each request, None for those without room; the sum of their `gains [requests, drafters]` is the
    greatest there is.

    Drafter j takes no more than `limits[j]` requests. As many as possible are matched, also where their gains are
    negative. Raises `ValueError` for gains that are not finite.
    """
    requests, drafters = gains.shape
    matched: list[int | None] = [None] * requests
    if not gains.size:
        return matched
    if not np.isfinite(gains).all():
        raise ValueError("gains are not finite")
    best = gains.argmax(1)
    if (np.bincount(best, minlength=drafters) <= limits).all():
        return best.tolist()
    # A replica of a drafter for each request it may take.
    replicas = np.repeat(np.arange(drafters), [min(b, requests) for b in limits])
    for i, column in zip(*linear_sum_assignment(gains[:, replicas], maximize=True), strict=True):
        matched[i] = int(replicas[column])
    return matched


#: Most drafters of which all sets are tried.
_TRIED = 6


def match_shared(
    tokens: np.ndarray, limits: Sequence[int], step: float, rounds: Sequence[float], busy: Set[int]
) -> list[int | None]:
    """The same where drafters take turns with the target: of all sets of drafters the one with which most tokens a
    second come, all requests by the seconds of a step and of every used drafter's round.

    `tokens [requests, drafters]` are expected in a slot; who gets no drafter has the target's own. The drafters in
    `busy` are used by others in any case. With more than six drafters, all are used.
    """
    requests, drafters = tokens.shape
    every = range(drafters)
    sets = chain.from_iterable(combinations(every, n) for n in every) if drafters <= _TRIED else ()
    best, found = -np.inf, [None] * requests
    for used in (*sets, tuple(every)):
        matched = match(tokens[:, used], [limits[j] for j in used])
        expected = sum(1.0 if j is None else float(tokens[i, used[j]]) for i, j in enumerate(matched))
        speed = expected / (step + sum(rounds[j] for j in {*busy, *used}))
        if speed > best:
            best, found = speed, [None if j is None else used[j] for j in matched]
    return found
