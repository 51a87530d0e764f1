"""What each request's latency target asks for, and then what the step still holds: AdaServe's selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from jaxspec.sched.steptimes import StepTimes
from jaxspec.sched.trees.candidates import Candidates


@dataclass(frozen=True, slots=True)
class AdaServe:
    """SLO-customised selection, then throughput-optimised selection (AdaServe §4.3, Algorithm 2).

    First requests take their best nodes, those that need most at first, until the expected number of accepted tokens
    is what they need (A_cap: at most one a level and the root's own), or they have `most_nodes`. What the budget has
    left goes to the likeliest nodes over all requests. With `times`, the second part ends where another node would
    lower the expected tokens per second: on a device without a plateau a budget is no reason to spend it.
    """

    most_nodes: int
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        if self.most_nodes < 0:
            raise ValueError(f"most_nodes is negative: {self.most_nodes}")

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], budget: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        best = [c.best(min(limit, max(budget, 0))) for c, limit in zip(candidates, limits, strict=True)]
        chances = [[exp(value) for value in values] for _, values in best]
        taken, left = [0] * len(best), max(budget, 0)
        for i in sorted(range(len(best)), key=lambda i: -needs[i]):
            needed = min(needs[i], candidates[i].levels + 1)
            expected, most = 1.0, min(len(chances[i]), self.most_nodes)
            while expected < needed and taken[i] < most and left:
                expected += chances[i][taken[i]]
                taken[i] += 1
                left -= 1
        promised = sum(taken)
        rest = _likeliest(chances, taken, left)
        expected = others + sum(sum(own[:k]) for own, k in zip(chances, taken, strict=True))
        for _, i in rest[: self._worth([p for p, _ in rest], expected, others + promised)]:
            taken[i] += 1
        return [c.mask(nodes[:k]) for c, (nodes, _), k in zip(candidates, best, taken, strict=True)]

    def _worth(self, chances: Sequence[float], expected: float, tokens: int) -> int:
        """How many nodes with these falling chances to add to a step of `tokens` that is expected to give so many."""
        if self.times is None:
            return len(chances)
        fastest, count = expected / self.times.of(max(tokens, 1)), 0
        for m, p in enumerate(chances, 1):
            expected += p
            if (speed := expected / self.times.of(tokens + m)) >= fastest:
                fastest, count = speed, m
        return count


def optimal(candidates: Sequence[Candidates], budget: int, needs: Sequence[float]) -> list[np.ndarray] | None:
    """AdaServe's Algorithm 1: the most expected tokens, were the log-probabilities of the candidates' paths the truth.

    -> the chosen nodes as masks, or None (INVALID) if `budget` tokens, roots included, do not give every request what
    it needs. Not for serving: what `AdaServe` does is compared with it.
    """
    left = budget - len(candidates)
    best = [c.best(len(c)) for c in candidates]
    chances = [[exp(value) for value in values] for _, values in best]
    taken = [0] * len(best)
    if left < 0:
        return None
    for i, need in enumerate(needs):
        expected = 1.0
        while expected < need:
            if not left or taken[i] == len(chances[i]):
                return None
            expected += chances[i][taken[i]]
            taken[i] += 1
            left -= 1
    for _, i in _likeliest(chances, taken, left):
        taken[i] += 1
    return [c.mask(nodes[:k]) for c, (nodes, _), k in zip(candidates, best, taken, strict=True)]


def _likeliest(chances: Sequence[Sequence[float]], taken: Sequence[int], count: int) -> list[tuple[float, int]]:
    """(chance, request) of the best nodes beyond those taken, falling; equals go to the earlier request."""
    rest = sorted((-p, i) for i, own in enumerate(chances) for p in own[taken[i] :])
    return [(-p, i) for p, i in rest[:count]]
