"""Priority: static priorities given by the client."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request


class Priority(Order):
    """Smaller numbers go first, as in vLLM. Equal ones go in order of arrival and never preempt each other."""

    def __init__(self, preemptive: bool) -> None:
        self.preemptive = preemptive

    def key(self, request: Request) -> Any:
        return request.priority
