"""What every order of service offers."""

from __future__ import annotations

from typing import Any, Protocol

from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request


class Order(Protocol):
    """Who goes first. The bodies here are those of an order that neither preempts nor learns."""

    #: Whether requests that wait take the seats of running ones that come after them.
    preemptive: bool = False

    def key(self, request: Request) -> Any:
        """Where the request stands: smaller goes first. Equal keys go in order of arrival, and neither preempts.

        A waiting request's key changes only with its length prediction.
        """
        ...

    def preemptible(self, request: Request) -> bool:
        """Whether the running request gives its seat to one with a smaller key."""
        return True

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        """The request took part in a round of that many seconds; its own counts include it already."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
