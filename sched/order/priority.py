"""Priority: static priorities given by the client."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext


class PrioritySettings(Section):
    """`order: priority`: static priorities."""

    #: Whether a waiting request preempts a running request with lower priority. Ties never preempt.
    preemptive: bool = True


@ORDERS.register("priority", PrioritySettings)
class Priority(Order):
    """Smaller numbers go first, as in vLLM. Equal ones go in order of arrival and never preempt each other."""

    needs = frozenset({Need.PRIORITIES})
    rule = "smaller priority numbers go first"

    def __init__(self, preemptive: bool) -> None:
        self.preemptive = preemptive

    @classmethod
    def build(cls, settings: PrioritySettings, context: SlotContext) -> Priority:
        return cls(settings.preemptive)

    @classmethod
    def preempts(cls, settings: PrioritySettings) -> bool:
        return settings.preemptive

    def key(self, request: Request) -> Any:
        return request.priority
