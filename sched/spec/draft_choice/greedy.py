"""Short prompts for small drafters: SPIN's greedy baseline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import SwitchCost, Unlearned


class Greedy(Unlearned):
    """Requests with shorter prompts get smaller drafters (§VI-B2), and keep them to their end.

    The shortest fill the smallest drafter up to its limit, those after them the next. Where the limits leave room, the
    shares are as even as they allow: without limits ⌈n/M⌉ at most of n requests on M drafters. One that comes later
    goes where its prompt's length puts it among all there are, or else to the drafter nearest in size whose share is
    not full; its place stays its own also in steps that it takes no part in. `sizes [drafters]` says which drafter is
    smaller, in any unit.
    """

    def __init__(self, limits: Sequence[int], sizes: Sequence[float]) -> None:
        self._order = sorted(range(len(sizes)), key=sizes.__getitem__)
        # By rank in size, as all ranks below.
        self._limits = [limits[j] for j in self._order]
        #: Prompt length and rank of the drafter of each request that has one.
        self._held: dict[str, tuple[int, int]] = {}

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        if new := [r for r in requests if r.id not in self._held]:
            self._place(new)
        return [self._order[self._held[r.id][1]] if r.id in self._held else None for r in requests]

    def forget(self, request: Request) -> None:
        self._held.pop(request.id, None)

    def _place(self, new: Sequence[Request]) -> None:
        held = self._held.values()
        lengths = sorted([*(length for length, _ in held), *(r.prompt_len for r in new)])
        shares = self._shares(len(lengths))
        ends = list(accumulate(shares))
        room = list(shares)
        for _, rank in held:
            room[rank] -= 1
        for r in sorted(new, key=lambda r: r.prompt_len):
            if not (free := [rank for rank, n in enumerate(room) if n > 0]):
                return
            wanted = bisect_right(ends, bisect_left(lengths, r.prompt_len))
            rank = min(free, key=lambda rank: abs(rank - wanted))
            room[rank] -= 1
            self._held[r.id] = r.prompt_len, rank

    def _shares(self, requests: int) -> list[int]:
        """Most requests of each drafter: the evenest shares in which all have room, if the limits allow."""
        placed = min(requests, sum(self._limits))
        even = next(n for n in range(requests + 1) if sum(min(b, n) for b in self._limits) >= placed)
        return [min(b, even) for b in self._limits]
