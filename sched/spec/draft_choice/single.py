"""Single: one drafter for all requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.sched.request import Request
from jaxspec.sched.slots import DRAFT_CHOICES, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost, batch_limits


@DRAFT_CHOICES.register("single")
class Single(DraftChoice):
    """The first drafter drafts for a step's first requests, up to its batch limit: SPIN's vanilla system."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limit = limits[0]

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Single:
        return cls(batch_limits(context))

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        return [0 if i < self._limit else None for i in range(len(requests))]
