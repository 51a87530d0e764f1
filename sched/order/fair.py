"""Fair queueing: tenants get equal shares of the engine, however many requests each of them sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, SlotContext


class Tags(NamedTuple):
    """Start and finish tag of a request, in tokens of virtual time. output: output tokens in its finish tag; arrived:
    the virtual time of its arrival."""

    start: float
    output: float
    arrived: float


@ORDERS.register("fair")
class Fair(Order):
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants, that is API keys; no preemption.

    A request's start tag is the virtual time of its arrival, or the finish tag of its tenant's request before, if that
    is later. Its finish tag is the start tag plus its prompt and predicted output tokens; a prediction that comes after
    the arrival also moves the tenant's later requests. The smallest start tag goes first, and the virtual time is the
    largest start tag that has run; when the engine has become idle, the largest finish tag. So a tenant that sends much
    waits for itself, and an idle one saves up nothing. With one tenant this is FCFS. VTC (Sheng et al., OSDI 2024)
    counts tokens as they are served; here an answer is charged before it runs for what is predicted, even if it is
    cancelled.
    """

    needs = frozenset({Need.LENGTHS})
    rule = "the API key that has asked for the fewest tokens goes first"

    def __init__(self) -> None:
        self._time = 0.0
        self._finish: dict[str, float] = {}  # of each tenant's latest request
        self._line: dict[str, deque[ref[Request]]] = {}  # each tenant's requests that have not run, in order of arrival
        self._tags = PerRequest(self._begin)
        self._moved: WeakSet[Request] = WeakSet()

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Fair:
        return cls()

    def _begin(self, request: Request) -> Tags:
        tenant, now = request.tenant, self._time
        start = max(now, self._finish.get(tenant, 0.0))
        self._finish = {name: at for name, at in self._finish.items() if at > now}
        self._finish[tenant] = start + request.prompt_len + request.expected_len
        self._line = {name: line for name, line in self._line.items() if name in self._finish}
        line = self._line.setdefault(tenant, deque())
        while line and not _waits(line[0]()):
            line.popleft()
        line.append(ref(request))
        return Tags(start, request.expected_len, now)

    def begins(self) -> None:
        self._time = max((self._time, *self._finish.values()))

    def key(self, request: Request) -> Any:
        tags = self._tags.of(request)
        if _waits(request) and tags.output != request.expected_len:
            self._tags.set(request, tags._replace(output=request.expected_len))
            self._follow(request)
        return tags.start

    def _follow(self, changed: Request) -> None:
        """The finish tag of a waiting request has changed: its tenant's later ones start where it ends."""
        found = (known() for known in self._line.get(changed.tenant, ()))
        line = [request for request in found if request is not None and _waits(request)]
        if changed not in line:
            return
        finish = self._finish_of(changed)
        for request in line[line.index(changed) + 1 :]:
            tags = self._tags.of(request)
            self._tags.set(request, tags._replace(start=max(tags.arrived, finish)))
            self._moved.add(request)
            finish = self._finish_of(request)
        self._finish[changed.tenant] = finish

    def _finish_of(self, request: Request) -> float:
        tags = self._tags.of(request)
        return tags.start + request.prompt_len + tags.output

    def started(self, request: Request) -> None:
        self._time = max(self._time, self._tags.of(request).start)

    def rekeyed(self) -> Iterable[Request]:
        moved, self._moved = self._moved, WeakSet()
        return [request for request in moved if not request.ended]


def _waits(request: Request | None) -> bool:
    """Whether it is there and has not had a slot yet."""
    return request is not None and request.first_scheduled is None and not request.ended
