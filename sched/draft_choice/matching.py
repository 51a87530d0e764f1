"""Who gets which drafter, where that is known to be worth so and so much: maximum-weight matching (SPIN Eq. 10-12)."""

from __future__ import annotations

from collections.abc import Sequence

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
