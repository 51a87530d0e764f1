"""SRPT: shortest remaining predicted work first, with limited preemption (TRAIL)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxspec.sched.order.order import Order
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext


class SrptSettings(Section):
    """`order: srpt`: shortest remaining predicted work first."""

    #: Share of its predicted output from which on a request is not preempted any more (TRAIL's c). 1: always preempted.
    #: At 0.5 or less, the doubling of an exceeded prediction does not make a request preemptible.
    preemptible_share: float = Field(default=0.5, ge=0, le=1)


@ORDERS.register("srpt", SrptSettings)
class Srpt(Order):
    """The request with the fewest predicted output tokens left goes first and preempts others (TRAIL, arXiv
    2410.01035).

    A request near its predicted end is not preempted: it would hold its pages for little. Nor by default is one that
    has exceeded its prediction, which is then doubled without knowing more; a length probe does know more. Without a
    prediction, the output is taken to be max_tokens.
    """

    preemptive = True
    rule = "requests with fewer predicted tokens left go first"
    needs = frozenset({Need.LENGTHS})

    def __init__(self, preemptible_share: float) -> None:
        self._share = preemptible_share

    @classmethod
    def build(cls, settings: SrptSettings, context: SlotContext) -> Srpt:
        return cls(settings.preemptible_share)

    def key(self, request: Request) -> Any:
        return request.expected_len - request.output_len

    def preemptible(self, request: Request) -> bool:
        return request.output_len < self._share * request.expected_len
