"""A routing policy as an ingress applies it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jaxspec.sched.routing import Health, Replica, RoutedRequest, Routing
from jaxspec.sched.routing.health import HealthState


class Choice(Routing):
    """Chooses by `policy` among the replicas that are not `excluded` for the request's id. Raises `NoReplica`.

    A replica on probation goes first, except for requests with an SLO: the policy might never choose one that was slow,
    and then nothing would show that it is fast again. `health` offers it for one request at a time.
    """

    def __init__(self, policy: Routing, health: Health, excluded: Callable[[str], Collection[str]]) -> None:
        super().__init__(policy.settings, policy.random)
        self._policy, self._health, self._excluded = policy, health, excluded

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        if excluded := self._excluded(request.id):
            replicas = tuple(replica for replica in replicas if replica.name not in excluded)
        if not request.slo:
            for replica in replicas:
                if self._health.state(replica) is HealthState.PROBATION:
                    return replica
        return self._policy.choose(request, replicas, now)
