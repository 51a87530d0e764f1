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

    #: Probability that the requests of a step get random drafters (ε).
    epsilon: float = Field(default=0.2, ge=0, le=1)


@DRAFT_CHOICES.register("epsilon_greedy", EpsilonGreedySettings)
class EpsilonGreedy(DraftChoice):
    """In each slot, all requests get the best drafter, or with probability ε each a random one (§VI-B2).

    The best is the one with the best mean goodput so far, in tokens per second over all requests. Where it is full, the
    next best drafts; random drafters are drawn from those that are not full. All requests have the same slots: the
    first `assign` after an `observe` begins one, with one draw for all. Requests that come later join it.

    The paper's text has the probabilities the other way round: all requests use the best with probability ε = 0.2 and
    random ones with 1 - ε, "for better exploration". That is `epsilon` 0.8 here; as four random slots of five exploit
    little, the default takes 0.2 as ε-greedy is usually defined.
    """

    def __init__(self, limits: Sequence[int], rng: np.random.Generator, epsilon: float) -> None:
        self._limits, self._rng, self._epsilon = list(limits), rng, epsilon
        self._tokens, self._seconds = [0] * len(limits), [0.0] * len(limits)
        #: Whether the current slot's requests get random drafters; None: the next `assign` begins a slot.
        self._explores: bool | None = None
        #: Request id -> its drafter in the current slot.
        self._assigned: dict[str, int] = {}
        #: The drafter of the last slot.
        self._present = PerRequest[int | None](lambda _: None)

    @classmethod
    def build(cls, settings: EpsilonGreedySettings, context: SlotContext) -> EpsilonGreedy:
        return cls(batch_limits(context), generator(context), settings.epsilon)

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        if not requests:
            return []
        if self._explores is None:
            self._explores = bool(self._rng.random() < self._epsilon)
            self._assigned.clear()
        capacity = list(self._limits)
        new = [r for r in requests if not self._keeps(r, capacity)]
        best_first = sorted(range(len(capacity)), key=lambda j: -self._goodput(j))
        for request in new:
            if not (free := [j for j in best_first if capacity[j]]):
                break
            j = free[int(self._rng.integers(len(free)))] if self._explores else free[0]
            capacity[j] -= 1
            self._assigned[request.id] = j
        return [self._assigned.get(r.id) for r in requests]

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        self._explores = None
        if drafter is not None:
            self._tokens[drafter] += tokens
            self._seconds[drafter] += seconds
            self._present.set(request, drafter)

    def ahead(self, request: Request) -> int | None:
        best = max(range(len(self._limits)), key=self._goodput)
        return None if self._present.of(request) in (None, best) else best

    def ended(self, request: Request) -> None:
        self._assigned.pop(request.id, None)

    def _keeps(self, request: Request, capacity: list[int]) -> bool:
        """Whether the request has a drafter in this slot; not if others filled it while the request did not ask."""
        j = self._assigned.get(request.id)
        if j is None or not capacity[j]:
            self._assigned.pop(request.id, None)
            return False
        capacity[j] -= 1
        return True

    def _goodput(self, drafter: int) -> float:
        return self._tokens[drafter] / self._seconds[drafter] if self._seconds[drafter] else 0.0
