"""Fair queueing: tenants get equal shares of the engine, however many requests each of them sends."""

from __future__ import annotations

from typing import Any

from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, SlotContext


@ORDERS.register("fair")
class Fair(Order):
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants, that is API keys; no preemption.

    A request's start tag is the virtual time of its arrival, or the finish tag of its tenant's request before, if that
    is later. Its finish tag is the start tag plus its prompt and predicted output tokens. The smallest start tag goes
    first, and the virtual time is the largest start tag that has run; when the engine has become idle, the largest
    finish tag. So a tenant that sends much waits for itself, and an idle one saves up nothing. With one tenant this is
    FCFS. VTC (Sheng et al., OSDI 2024) counts tokens as they are served; here an answer is charged at its arrival for
    what is predicted, even if it is cancelled.
    """

    needs = frozenset({Need.LENGTHS})
    rule = "the API key that has asked for the fewest tokens goes first"

    def __init__(self) -> None:
        self._time = 0.0
        self._finish: dict[str, float] = {}  # of each tenant's latest request
        self._tags = PerRequest(self._begin)  # start tag, and the output tokens that the finish tag has

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Fair:
        return cls()

    def _begin(self, request: Request) -> tuple[float, float]:
        start = max(self._time, self._finish.get(request.tenant, 0.0))
        self._finish = {tenant: at for tenant, at in self._finish.items() if at > self._time}
        self._finish[request.tenant] = start + request.prompt_len + request.expected_len
        return start, request.expected_len

    def begins(self) -> None:
        self._time = max((self._time, *self._finish.values()))

    def key(self, request: Request) -> Any:
        start, charged = self._tags.of(request)
        # Predictions that read the prompt come after the arrival.
        if request.first_scheduled is None and charged != request.expected_len:
            if request.tenant in self._finish:
                self._finish[request.tenant] += request.expected_len - charged
            self._tags.set(request, (start, request.expected_len))
        return start

    def started(self, request: Request) -> None:
        self._time = max(self._time, self._tags.of(request)[0])
