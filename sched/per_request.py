"""Values per request that policies and drafters keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from jaxspec.sched.request import Request

T = TypeVar("T")


class PerRequest(WeakKeyDictionary[Request, T]):
    """A value per request, which is dropped together with the request: nobody has to report the request's end.

    Requests are compared by identity. A later request with the same id gets a value of its own.
    """

    def __init__(self, new: Callable[[Request], T]) -> None:
        super().__init__()
        self._new = new

    def of(self, request: Request) -> T:
        """The request's value, created at the first call."""
        value = self.get(request)
        if value is None:
            value = self[request] = self._new(request)
        return value
