"""Assignment of drafters to requests for known gains: maximum-weight matching (SPIN Eq. 10-12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain, combinations
from typing import cast

import numpy as np
import numpy.typing as npt


def match(gains: npt.NDArray[np.float64], limits: Sequence[int]) -> list[int | None]:
    """The drafter of each request that maximises the sum of `gains` `[requests, drafters]`; None for those left over.

    Drafter j gets at most `limits[j]` requests. As many requests as possible are matched, even at negative gains.
    Raises `ValueError` for gains that are not finite.
    """
    requests, drafters = len(gains), int(gains.shape[1])
    matched: list[int | None] = [None] * requests
    if not gains.size:
        return matched
    if not np.isfinite(gains).all():
        raise ValueError("gains are not finite")
    best = gains.argmax(1)
    if (np.bincount(best, minlength=drafters) <= limits).all():
        return best.tolist()
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # half a second; rarely needed

    # One column for each request that a drafter may take.
    replicas = np.repeat(np.arange(drafters), [min(b, requests) for b in limits])
    assignment = cast(Callable[..., tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]], linear_sum_assignment)
    rows, columns = assignment(gains[:, replicas], maximize=True)
    for i, column in zip(rows.tolist(), columns.tolist(), strict=True):
        matched[i] = int(replicas[column])
    return matched


#: Most drafters for which all subsets are tried.
_MAX_SUBSETS_OF = 6


def match_shared(
    tokens: npt.NDArray[np.float64], limits: Sequence[int], step: float, rounds: Sequence[float], busy: Set[int]
) -> list[int | None]:
    """As `match`, for drafters on the target's device: maximises tokens per second of all requests together.

    Of all sets of drafters, takes the one with most expected tokens per `step` seconds plus the rounds (`rounds[j]`
    seconds) of the drafters used. `tokens` `[requests, drafters]` are expected per slot; a request without a drafter
    gets one. Drafters in `busy` are in use by other requests in any case. With more than six drafters, all are used.
    """
    requests, drafters = tokens.shape
    every = range(drafters)
    subsets = chain.from_iterable(combinations(every, n) for n in every) if drafters <= _MAX_SUBSETS_OF else ()
    best = -np.inf
    found: list[int | None] = [None] * requests
    for used in (*subsets, tuple(every)):
        matched = match(tokens[:, used], [limits[j] for j in used])
        expected = sum(1.0 if j is None else float(tokens[i, used[j]]) for i, j in enumerate(matched))
        speed = expected / (step + sum(rounds[j] for j in {*busy, *used}))
        if speed > best:
            best, found = speed, [None if j is None else used[j] for j in matched]
    return found
