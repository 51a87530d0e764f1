"""Who goes first: the queue, the order of service and the choice of whom to preempt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from jaxspec.sched.request import Request


class Fcfs:
    """First come, first served, strictly: a request that does not fit blocks those behind it.

    Running requests are kept in the order of admission. They came before all waiting ones, and the last admitted came
    last: so sending that one back to the front of the queue keeps the queue in order of arrival.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())

    def first(self) -> Request | None:
        """The request to admit next; None when nobody waits."""
        return next(iter(self._queue.values()), None)

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._queue[request.id] = request

    def put_back(self, request: Request) -> None:
        """Queue a preempted request again."""
        self._queue[request.id] = request
        self._queue.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        del self._queue[request.id]

    def service(self, running: Sequence[Request]) -> list[Request]:
        """The running requests in the order in which a step is filled: decoding is never delayed by prefill."""
        return sorted(running, key=lambda request: not request.decoding)

    def victim(self, running: Sequence[Request]) -> Request:
        """The request that loses its pages: the last admitted has the least to lose, and the first always advances."""
        return running[-1]
