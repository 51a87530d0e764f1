"""Shortest job first, by predicted output length."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request


class Sjf(Order):
    """SSJF §3.2: the shortest predicted output goes first, ties in order of arrival; who runs is not preempted.

    LAPS-SD's baseline LP-SJF (§5.1) is the same order under speculation: it takes the length for the execution time.
    With the oracle for a predictor it is SSJF's baseline. Without a prediction a request counts as its max_tokens.
    """

    def key(self, request: Request) -> Any:
        return request.expected_len
