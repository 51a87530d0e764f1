"""Oracle draft choices: they know the true acceptance rate of each draft model for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.bench.papers.spin.difficulty import accepted
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost
from jaxspec.sched.spec.draft_choice.matching import match


class Oracle(DraftChoice):
    """SPIN's Eq. 3 to 5 solved with true goodputs: a request's tokens over its own drafter's time plus a step.

    rates `[requests, models]`; rounds: draft seconds of each model; limits: most requests per model.
    """

    def __init__(
        self, rates: np.ndarray, rounds: Sequence[float], step: Callable[[], float], limits: Sequence[int]
    ) -> None:
        self._tokens, self._rounds = 1 + accepted(rates), np.asarray(rounds)
        self._step, self._limits = step, limits

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        return match(self._tokens[[int(r.id) for r in requests]] / (self._rounds + self._step()), self._limits)


class Together(DraftChoice):
    """Oracle for steps that wait for the slowest drafter: maximises the sum of tokens over the step's seconds.

    For each slowest drafter considered, every request gets the model with the highest acceptance rate among those that
    are not slower.
    """

    def __init__(self, rates: np.ndarray, rounds: Sequence[float], step: Callable[[], float]) -> None:
        self._accepted, self._step = accepted(rates), step
        self._order = np.argsort(rounds)
        self._rounds = np.asarray(rounds)[self._order]

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        if not requests:
            return []
        known = self._accepted[[int(r.id) for r in requests]][:, self._order]
        speeds = (1 + np.maximum.accumulate(known, axis=1)).sum(0) / (self._rounds + self._step())
        return self._order[known[:, : int(speeds.argmax()) + 1].argmax(1)].tolist()


class Heard(DraftChoice):
    """Wraps a draft choice and sums the tokens and seconds it observes.

    Gives the goodput as the paper's bandit counts it: a slot lasts as long as its own drafting and the verification,
    without waiting for other drafters.
    """

    def __init__(self, choice: DraftChoice) -> None:
        self._choice = choice
        self.tokens, self.seconds = 0, 0.0

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        return self._choice.assign(requests, cost)

    def share(self, step: float, rounds: Sequence[float], verify: Sequence[float]) -> None:
        self._choice.share(step, rounds, verify)

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self._choice.observe(request, drafter, tokens, seconds)

    def ahead(self, request: Request) -> int | None:
        return self._choice.ahead(request)

    def ended(self, request: Request) -> None:
        self._choice.ended(request)
