"""Pairwise: shortest job first, by comparing two requests at a time."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from pydantic import Field

from jaxspec.sched.length import true_len
from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Section, SlotContext

#: Whether the first of two requests is the shorter one. Called O(log n) times for each of n waiting requests.
Comparator = Callable[[Request, Request], bool]


class PairwiseSettings(Section):
    """`order: pairwise`: shortest job first by comparing requests two at a time (SSJF §3.1)."""

    #: Fraction of pairs that the comparator gets wrong. Comparing the same pair again gives the same result.
    error_rate: float = Field(default=0.0, ge=0, le=1)


@ORDERS.register("pairwise", PairwiseSettings)
class Pairwise(Order):
    """SSJF's alternative (§3.1): lengths are unknown, only which of two requests is shorter."""

    rule = "answers that are judged shorter go first"

    def __init__(self, shorter: Comparator) -> None:
        self._shorter = shorter

    @classmethod
    def build(cls, settings: PairwiseSettings, context: SlotContext) -> Pairwise:
        return cls(OracleComparator(settings.error_rate, context.config.policy_seed))

    def key(self, request: Request) -> Any:
        return _Compared(request, self._shorter)


class _Compared:
    """A sort key that is ordered by the comparator."""

    __slots__ = ("request", "shorter")

    def __init__(self, request: Request, shorter: Comparator) -> None:
        self.request, self.shorter = request, shorter

    def __lt__(self, other: _Compared) -> bool:
        return self.shorter(self.request, other.request)


class OracleComparator:
    """Compares true lengths and errs on a share `error_rate` of all pairs; a pair always gets the same result."""

    def __init__(self, error_rate: float, seed: int) -> None:
        self._error_rate, self._seed = error_rate, seed

    def __call__(self, a: Request, b: Request) -> bool:
        return ((true_len(a), a.number) < (true_len(b), b.number)) != self._wrong(a.number, b.number)

    def _wrong(self, a: int, b: int) -> bool:
        if not self._error_rate:
            return False
        pair = f"{self._seed} {min(a, b)} {max(a, b)}".encode()
        return int.from_bytes(blake2b(pair, digest_size=8).digest()) < self._error_rate * 2**64
