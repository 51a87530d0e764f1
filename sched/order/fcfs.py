"""First come, first served."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request


class Fcfs(Order):
    """In order of arrival, strictly: a request that does not fit blocks those behind it."""

    def key(self, request: Request) -> Any:
        return ()
