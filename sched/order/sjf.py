"""SJF: shortest job first, by predicted output length."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need


@ORDERS.register("sjf")
class Sjf(Order):
    """SSJF §3.2: the shortest predicted output goes first, ties in order of arrival; no preemption.

    With speculation, this is LAPS-SD's baseline LP-SJF (§5.1), which takes the length for the execution time. With the
    length oracle, it is SSJF's oracle baseline. A request without a prediction counts as its max_tokens.
    """

    needs = frozenset({Need.LENGTHS})
    rule = "shorter predicted answers go first"

    def key(self, request: Request) -> Any:
        return request.expected_len
