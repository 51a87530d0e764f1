"""What each request's latency target asks for, and then what the step still holds: AdaServe's selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest, Ranked
from jaxspec.sched.timing import StepTimes


@dataclass(frozen=True, slots=True)
class AdaServe:
    """SLO-customised selection, then throughput-optimised selection (AdaServe §4.3, Algorithm 2).

    First requests take their best nodes, those that need most at first, until the expected number of accepted tokens
    is what they need (A_cap: at most one a level and the root's own), or they have `max_nodes`. What the budget has
    left goes to the likeliest nodes over all requests. With `times`, the second part ends where another node would
    lower the expected tokens per second: on a device without a plateau a budget is no reason to spend it.
    """

    max_nodes: int
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        if self.max_nodes < 0:
            raise ValueError(f"max_nodes is negative: {self.max_nodes}")

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        forest, left = Forest.of(candidates), max(room, 0)
        ranked = forest.ranked()
        ranked = ranked._replace(value=np.exp(ranked.value))
        most = np.clip(limits, 0, np.minimum(ranked.count, left))
        taken, given = self._promised(forest, ranked, most, left, needs)
        promised = sum(taken)
        off = forest.best(ranked, most, taken)[: left - promised]
        worth = len(off)
        if self.times is not None:
            worth = self.times.worth(ranked.value[off], others + given, others + promised)
        more = np.bincount(forest.tree[off[:worth]], minlength=len(forest))
        return forest.take(ranked, taken + more)

    def _promised(
        self, forest: Forest, ranked: Ranked, most: np.ndarray, left: int, needs: Sequence[float]
    ) -> tuple[list[int], float]:
        """How many nodes each request takes for its target, and how many accepted tokens are expected of them."""
        taken, given = [0] * len(forest), 0.0
        levels, at_most = forest.levels().tolist(), np.minimum(most, self.max_nodes).tolist()
        for i in sorted(range(len(forest)), key=lambda i: -needs[i]):
            needed, expected = min(needs[i], levels[i] + 1), 1.0
            if expected >= needed:
                continue
            first = int(forest.first[i])
            for p in ranked.value[first : first + min(at_most[i], left)].tolist():
                if expected >= needed:
                    break
                expected += p
                taken[i] += 1
            left -= taken[i]
            given += expected - 1.0  # the root's
        return taken, given


def optimal(candidates: Sequence[Candidates], room: int, needs: Sequence[float]) -> list[np.ndarray] | None:
    """AdaServe's Algorithm 1: the most expected tokens, were the log-probabilities of the candidates' paths the truth.

    -> the chosen nodes as masks, or None (INVALID) if `room` tokens, roots included, do not give every request what
    it needs. Not for serving: what `AdaServe` does is compared with it.
    """
    left = room - len(candidates)
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
    off = sorted((-p, i) for i, own in enumerate(chances) for p in own[taken[i] :])
    for _, i in off[:left]:  # equals go to the earlier request
        taken[i] += 1
    return [c.mask(nodes[:k]) for c, (nodes, _), k in zip(candidates, best, taken, strict=True)]
