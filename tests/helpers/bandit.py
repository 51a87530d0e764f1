"""Simulated bandit for draft-choice policies: each request has a known mean number of tokens on each drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from jaxspec.sched import Request
from jaxspec.sched.spec.draft_choice.choice import DraftChoice

#: Most tokens that a request can get in one slot of one second.
MOST = 10


def request(name: str, prompt_len: int = 16) -> Request:
    return Request(name, prompt_len, [0] * prompt_len, 100, 0.0)


def best_by_trying(gains: np.ndarray, limits: Sequence[int]) -> tuple[int, float]:
    """(requests matched, sum of their gains) of the best assignment within the limits, found by brute force.

    An assignment with more matched requests is better; among equals, the one with the larger sum.
    """
    found = (0, 0.0)
    for assigned in product([None, *range(gains.shape[1])], repeat=len(gains)):
        if all(assigned.count(j) <= b for j, b in enumerate(limits)):
            taken = [gains[i, j] for i, j in enumerate(assigned) if j is not None]
            found = max(found, (len(taken), float(sum(taken))))
    return found


def play(
    policy: DraftChoice, means: np.ndarray, limits: Sequence[int], slots: int, seed: int, switch: float = 0.5
) -> tuple[np.ndarray, list[int | None]]:
    """Run `policy` for `slots` slots. Returns (cumulative regret `[slots]`, drafter of each request in the last slot).

    Request i gets a binomial number of tokens with mean `means[i, j]` on drafter j. Regret is counted against the best
    assignment, plus the tokens missed in `switch` seconds at each change of drafter.
    """
    requests = [request(str(i)) for i in range(len(means))]
    tokens = np.random.default_rng(seed).binomial(MOST, means / MOST, (slots, *means.shape)).tolist()
    _, optimum = best_by_trying(means, limits)
    rates = means.tolist()
    present: list[int | None] = [None] * len(means)
    lost, assigned = np.full(slots, optimum), present
    for t in range(slots):
        assigned = policy.assign(requests, lambda _, __: switch)
        for i, j in enumerate(assigned):
            policy.observe(requests[i], j, 1 if j is None else tokens[t][i][j], 1.0)
            if j is not None:
                lost[t] -= rates[i][j]
                lost[t] += switch * rates[i][j] * (present[i] not in (None, j))
                present[i] = j
    return lost.cumsum(), assigned
