"""Values per request that policies and drafters keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from jaxspec.sched.request import Request

T = TypeVar("T")


class PerRequest(Generic[T]):
    """A value per request. The request itself holds it, so it is gone with the request, whose end need not be reported.

    A later request with the same id gets a value of its own. A policy that has to look at all present requests needs a
    dictionary instead, and to be told when one has ended.
    """

    __slots__ = ("_new",)

    def __init__(self, new: Callable[[Request], T]) -> None:
        self._new = new

    def of(self, request: Request) -> T:
        """The request's value, created at the first call."""
        kept = request.kept
        if self in kept:
            return kept[self]
        kept[self] = value = self._new(request)
        return value

    def set(self, request: Request, value: T) -> None:
        request.kept[self] = value

    def drop(self, request: Request) -> None:
        """The next call of `of` creates a new value."""
        request.kept.pop(self, None)
