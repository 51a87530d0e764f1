"""Power of two choices: the less loaded one of two random replicas."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import ROUTINGS, Routing, some


@ROUTINGS.register("power_of_two")
class PowerOfTwo(Routing):
    """Mitzenmacher's power of two choices, by the number of requests. O(1), and it does not herd: where reports are
    old, a random pair spreads the requests."""

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        return less_loaded(two(some(replicas), self.random))


def two(replicas: Sequence[Replica], random: Random) -> Sequence[Replica]:
    """Two different replicas at random, or the only one."""
    return random.sample(replicas, 2) if len(replicas) > 1 else replicas


def less_loaded(replicas: Sequence[Replica]) -> Replica:
    """The one with the fewest requests, the first of several."""
    return min(replicas, key=lambda replica: replica.requests)
