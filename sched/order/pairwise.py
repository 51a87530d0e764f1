"""Shortest job first by comparing requests two at a time."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from jaxspec.sched.length import true_len
from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request

#: Whether the first of two requests is the shorter one. Asked O(log n) times for each of n that wait.
Comparator = Callable[[Request, Request], bool]


class Pairwise(Order):
    """SSJF's alternative (§3.1): nobody knows lengths, only which of two requests is shorter."""

    def __init__(self, shorter: Comparator) -> None:
        self._shorter = shorter

    def key(self, request: Request) -> Any:
        return _Compared(request, self._shorter)


class _Compared:
    """A request that knows its place beside another one only."""

    __slots__ = ("request", "shorter")

    def __init__(self, request: Request, shorter: Comparator) -> None:
        self.request, self.shorter = request, shorter

    def __lt__(self, other: _Compared) -> bool:
        return self.shorter(self.request, other.request)


class OracleComparator:
    """Right except for a stated share of the pairs. Two requests always get the same answer, whichever comes first."""

    def __init__(self, error_rate: float, seed: int) -> None:
        self._error_rate, self._seed = error_rate, seed

    def __call__(self, a: Request, b: Request) -> bool:
        return ((true_len(a), a.number) < (true_len(b), b.number)) != self._wrong(a.number, b.number)

    def _wrong(self, a: int, b: int) -> bool:
        if not self._error_rate:
            return False
        pair = f"{self._seed} {min(a, b)} {max(a, b)}".encode()
        return int.from_bytes(blake2b(pair, digest_size=8).digest()) < self._error_rate * 2**64
