"""FCFS: first come, first served."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS


@ORDERS.register("fcfs")
class Fcfs(Order):
    """Strictly in order of arrival: a request that does not fit blocks all later ones."""

    rule = "earlier requests go first"

    def key(self, request: Request) -> Any:
        return ()
