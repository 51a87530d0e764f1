"""ε-greedy: the best drafter so far, and now and then a random one (SPIN's baseline)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slots import DRAFT_CHOICES, Section, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost, batch_limits, generator


class EpsilonGreedySettings(Section):
    """`draft_choice: epsilon_greedy`: the ε-greedy baseline of SPIN (§VI-B2)."""

    #: Probability that a request gets a random drafter in a step (ε).
    epsilon: float = Field(default=0.2, ge=0, le=1)


@DRAFT_CHOICES.register("epsilon_greedy", EpsilonGreedySettings)
class EpsilonGreedy(DraftChoice):
    """In each slot, each request explores with probability ε, independently: a random drafter that is not full.

    Otherwise it gets, among those that are not full, the drafter with the best mean goodput so far, in tokens per
    second over all requests (§VI-B2).

    The paper's text has it the other way round, the best drafter with probability ε = 0.2 "for better exploration":
    taken literally, four slots of five would be random.
    """

    def __init__(self, limits: Sequence[int], rng: np.random.Generator, epsilon: float) -> None:
        self._limits, self._rng, self._epsilon = list(limits), rng, epsilon
        self._tokens, self._seconds = [0] * len(limits), [0.0] * len(limits)
        # The drafter of the next slot, and that of the last one.
        self._drawn = PerRequest[int | None](lambda _: None)
        self._present = PerRequest[int | None](lambda _: None)

    @classmethod
    def build(cls, settings: EpsilonGreedySettings, context: SlotContext) -> EpsilonGreedy:
        return cls(batch_limits(context), generator(context), settings.epsilon)

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        capacity = list(self._limits)
        new = [r for r in requests if not self._keeps(r, capacity)]
        best_first = sorted(range(len(capacity)), key=lambda j: -self._goodput(j))
        for request in new:
            if not (free := [j for j in best_first if capacity[j]]):
                break
            explores = self._rng.random() < self._epsilon
            j = free[int(self._rng.integers(len(free)))] if explores else free[0]
            capacity[j] -= 1
            self._drawn.set(request, j)
        return [self._drawn.of(r) for r in requests]

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        self._drawn.drop(request)
        if drafter is not None:
            self._tokens[drafter] += tokens
            self._seconds[drafter] += seconds
            self._present.set(request, drafter)

    def ahead(self, request: Request) -> int | None:
        best = max(range(len(self._limits)), key=self._goodput)
        return None if self._present.of(request) in (None, best) else best

    def _keeps(self, request: Request, capacity: list[int]) -> bool:
        """Whether the request keeps the drafter it drew: not if others filled it while it skipped a step."""
        j = self._drawn.of(request)
        if j is None or not capacity[j]:
            self._drawn.drop(request)
            return False
        capacity[j] -= 1
        return True

    def _goodput(self, drafter: int) -> float:
        return self._tokens[drafter] / self._seconds[drafter] if self._seconds[drafter] else 0.0
