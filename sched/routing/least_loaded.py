"""Least loaded: the replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import ROUTINGS, Routing, some


@ROUTINGS.register("least_loaded")
class LeastLoaded(Routing):
    """The replica with the fewest requests, a random one of several. O(n) for n replicas."""

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        counts = [replica.requests for replica in some(replicas)]
        fewest = min(counts)
        return self.random.choice([r for r, count in zip(replicas, counts, strict=True) if count == fewest])
