"""The router: keeps the replicas and their health, and routes requests by a policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxspec.sched.routing.forecast import forecast
from jaxspec.sched.routing.health import Health
from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.report import ReplicaReport
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import Routing

#: Seconds between two checks of the replicas' health.
_CHECK = 0.5
#: Seconds after which a replica on probation also gets a request with an SLO.
_PATIENCE = 5.0


class Router:
    """Sends each request to a replica. Not thread-safe.

    Events in: `add` and `remove` replicas, `update` with their reports and `check` after a round of them, `route` a
    request, its `first_token` and `ended`. Times are seconds on one clock, and must not go backwards.
    """

    def __init__(self, routing: Routing, health: Health | None = None) -> None:
        self.routing = routing
        self.health = Health() if health is None else health
        self._replicas: dict[str, Replica] = {}
        #: Where each request that has not ended is.
        self._where: dict[str, Replica] = {}
        self._available: tuple[Replica, ...] = ()
        self._checked: float | None = None
        #: Since when replicas on probation wait for a request, by name.
        self._probes: dict[str, float] = {}

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """All replicas by name, also those that get no requests."""
        return self._replicas

    def add(self, name: str) -> Replica:
        """A new replica. Raises `ValueError` if there is one with this name."""
        if name in self._replicas:
            raise ValueError(f"replica {name!r} is here already")
        self._checked = None
        return self._replicas.setdefault(name, Replica(name))

    def remove(self, name: str) -> list[str]:
        """A replica is gone. Returns the ids of its requests that have not ended; they are forgotten, and can be routed
        again. Raises `KeyError` for an unknown name."""
        replica = self._replicas.pop(name)
        self.health.forget(name)
        self._checked = None
        lost = [request_id for request_id, where in self._where.items() if where is replica]
        for request_id in lost:
            del self._where[request_id]
        return lost

    def update(self, name: str, report: ReplicaReport) -> None:
        """A replica has reported. Raises `KeyError` for an unknown name."""
        self._replicas[name].update(report)

    def check(self, now: float) -> None:
        """Check the replicas' health if the last time is a while ago.

        Every request does this as well. Without requests, only this notices that a replica has become silent or is
        back.
        """
        if self._checked is None or now - self._checked >= _CHECK:
            self.health.check([*self._replicas.values()], now)
            self._checked = now
            self._available = tuple(self.health.available(self._replicas.values()))
            self._probes = {r.name: self._probes.get(r.name, now) for r in self.health.probes(self._available)}

    def route(self, request: RoutedRequest, now: float, exclude: Collection[str] = ()) -> Replica:
        """Choose a replica and count the request as sent there. `exclude`: names of replicas that must not get it.

        A replica on probation gets the next request that it may get, one without an SLO for the first seconds: a policy
        might never choose a replica that was slow, and then nothing would show that it is fast again.

        Raises `NoReplica` if none is left, and `ValueError` if a request with its id has not ended.
        """
        if request.id in self._where:
            raise ValueError(f"request {request.id!r} was routed already")
        self.check(now)
        available = self._available
        if exclude:
            available = tuple(replica for replica in available if replica.name not in exclude)
        probes = [
            replica
            for replica in (available if self._probes else ())
            if (since := self._probes.get(replica.name)) is not None and (not request.slo or now - since >= _PATIENCE)
        ]
        replica = probes[0] if probes else self.routing.choose(request, available, now)
        if self._probes.pop(replica.name, None) is not None:  # until the next check at least
            rest = tuple(other for other in self._available if other is not replica)
            self._available = rest or self._available
        ttft = None if replica.report is None else forecast(request, replica, now).first
        replica.sent(request, now, ttft)
        self._where[request.id] = replica
        return replica

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request came back. Unknown ids are ignored."""
        if (replica := self._where.get(request_id)) is not None:
            replica.first_token(request_id, now)

    def ended(self, request_id: str, now: float) -> None:
        """A request has ended, by itself or not. Unknown ids are ignored."""
        if (replica := self._where.pop(request_id, None)) is not None:
            replica.ended(request_id, now)
