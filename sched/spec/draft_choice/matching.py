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
    tokens: npt.NDArray[np.float64], limits: Sequence[int], step: float, rounds: Sequence[float],
    verify: Sequence[float], busy: Set[int],
) -> list[int | None]:  # fmt: skip
    """As `match`, for drafters on the target's device: maximises tokens per second of these requests together.

    The step takes `step` seconds without drafts, plus `rounds[j]` for each drafter j in use, plus `verify[j]` for each
    request with drafter j. `tokens` `[requests, drafters]` are expected per slot. A request may be left without a
    drafter even where there is room, and then gets one token. Drafters in `busy` are in use by other requests in any
    case. With more than six drafters, either all are used or none.
    """
    requests, drafters = tokens.shape
    cost = np.asarray(verify, np.float64)
    sizes = range(1, drafters + 1) if drafters <= _MAX_SUBSETS_OF else (drafters,)
    gains, found = np.ones((requests, drafters + 1)), list[int | None]([None] * requests)
    best = requests / (step + sum(rounds[j] for j in busy))
    for used in chain.from_iterable(combinations(range(drafters), n) for n in sizes):
        columns, seconds = [*used, drafters], step + sum(rounds[j] for j in {*busy, *used})
        while True:  # Dinkelbach: maximise tokens - best * seconds, until nothing is faster than `best`
            gains[:, :drafters] = tokens - best * cost
            matched = match(gains[:, columns], [*(limits[j] for j in used), requests])
            drafter = [None if j is None else (*used, None)[j] for j in matched]
            expected = sum(1.0 if j is None else float(tokens[i, j]) for i, j in enumerate(drafter))
            speed = expected / (seconds + sum(verify[j] for j in drafter if j is not None))
            if speed <= best * (1 + 1e-9):
                break
            best, found = speed, drafter
    return found
