"""Round robin: one replica after the other."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.routing import ROUTINGS, Routing, some


@ROUTINGS.register("round_robin")
class RoundRobin(Routing):
    """The next replica in turn. Knows nothing of load; the baseline."""

    def __init__(self, settings: Any, random: Random) -> None:
        super().__init__(settings, random)
        self._next = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        replica = some(replicas)[self._next % len(replicas)]
        self._next += 1
        return replica
