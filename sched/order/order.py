"""The interface of an order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.slots import Policy


class Order(Policy):
    """Which request goes first. The default methods suit an order that neither preempts nor learns."""

    #: Whether waiting requests may take the slots of running requests that come after them.
    preemptive: bool = False
    #: What goes first, for people who watch, as in "shorter answers go first".
    rule: str = "the order puts them first"

    @classmethod
    def preempts(cls, settings: Any) -> bool:
        """`preemptive` with these settings."""
        return cls.preemptive

    def key(self, request: Request) -> Any:
        """Sort key: smaller goes first. Equal keys go in order of arrival and do not preempt each other.

        The key of a waiting request may change only with its length prediction, with its status and pages, or if
        `rekeyed` returns it: otherwise the queue is not sorted again.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `key`")

    def begins(self) -> None:
        """The first request comes after all others have ended."""

    def started(self, request: Request) -> None:
        """The request gets a slot for the first time."""

    def rekeyed(self) -> Iterable[Request]:
        """Requests, waiting or not, whose keys the steps since the last call have changed."""
        return ()

    def preemptible(self, request: Request) -> bool:
        """Whether a waiting request with a smaller key may take this running request's slot."""
        return True

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        """Learn from a step of `seconds` seconds in which the request decoded; its counters already include it."""
