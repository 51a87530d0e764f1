"""Greedy: short prompts get small drafters (SPIN's baseline)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jaxspec.sched.request import Request
from jaxspec.sched.slots import DRAFT_CHOICES, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice, SwitchCost, batch_limits


@DRAFT_CHOICES.register("greedy")
class Greedy(DraftChoice):
    """Requests with shorter prompts get smaller drafters (§VI-B2), and keep them until they finish.

    The shortest prompts fill the smallest drafter up to its share, the next ones the next drafter. Shares are as even
    as the limits allow: without limits, at most ⌈n/M⌉ of n requests for each of M drafters. A later request gets the
    drafter that its prompt length ranks it for among all present requests; if that one's share is full, the drafter
    nearest in size whose share is not. A request counts towards its drafter's share also in steps it takes no part in.
    `sizes` `[drafters]` may be in any unit.
    """

    def __init__(self, limits: Sequence[int], sizes: Sequence[float]) -> None:
        self._by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
        # By rank in size, as all ranks below.
        self._limits = [limits[j] for j in self._by_size]
        #: Request id -> prompt length, rank of its drafter.
        self._placed: dict[str, tuple[int, int]] = {}

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Greedy:
        return cls(batch_limits(context), [d.seconds(1, 1, 1, d.widths[0]) for d in context.drafters])

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        if new := [r for r in requests if r.id not in self._placed]:
            self._place(new)
        return [self._by_size[self._placed[r.id][1]] if r.id in self._placed else None for r in requests]

    def ended(self, request: Request) -> None:
        self._placed.pop(request.id, None)

    def _place(self, new: Sequence[Request]) -> None:
        placed = self._placed.values()
        lengths = sorted([*(length for length, _ in placed), *(r.prompt_len for r in new)])
        shares = self._shares(len(lengths))
        ends = list(accumulate(shares))
        free = list(shares)
        for _, rank in placed:
            free[rank] -= 1
        for r in sorted(new, key=lambda r: r.prompt_len):
            if not (ranks := [rank for rank, n in enumerate(free) if n > 0]):
                return
            wanted = bisect_right(ends, bisect_left(lengths, r.prompt_len))
            rank = min(ranks, key=lambda rank: abs(rank - wanted))
            free[rank] -= 1
            self._placed[r.id] = r.prompt_len, rank

    def _shares(self, requests: int) -> list[int]:
        """Most requests of each drafter: the most even shares that hold as many requests as the limits allow."""
        placed = min(requests, sum(self._limits))
        even = next(n for n in range(requests + 1) if sum(min(b, n) for b in self._limits) >= placed)
        return [min(b, even) for b in self._limits]
