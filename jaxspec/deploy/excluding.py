"""A routing policy without the replicas that a request has already tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jaxspec.sched.routing import Replica, RoutedRequest, Routing


class Excluding(Routing):
    """Chooses by `inner` among the replicas that are not `excluded` for the request's id. Raises `NoReplica`."""

    def __init__(self, inner: Routing, excluded: Callable[[str], Collection[str]]) -> None:
        super().__init__(inner.settings, inner.random)
        self._inner, self._excluded = inner, excluded

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        if excluded := self._excluded(request.id):
            replicas = tuple(replica for replica in replicas if replica.name not in excluded)
        return self._inner.choose(request, replicas, now)
