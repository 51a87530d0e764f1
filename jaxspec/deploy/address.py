"""Which replica a call through Ray Serve is meant for."""

from __future__ import annotations

from typing import Any


class Board:
    """The replicas that Ray Serve would send a call to. Written by the router's thread, read by the ingress."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()


class Address:
    """The first argument of every call: the replica that it is meant for; None: any. The board stays in the ingress."""

    def __init__(self, replica: str | None, board: Board | None = None) -> None:
        self.replica, self.board = replica, board

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self.replica,)
