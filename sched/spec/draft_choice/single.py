"""Single: one drafter for all requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import SwitchCost, Unlearned


class Single(Unlearned):
    """The first drafter drafts for a step's first requests, up to its batch limit: SPIN's vanilla system."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limit = limits[0]

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        return [0 if i < self._limit else None for i in range(len(requests))]
