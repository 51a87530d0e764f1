"""Routing policies by name. A policy is one file of this package, which registers it:

@ROUTINGS.register("round_robin")
class RoundRobin(Routing): ...
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.slots import Policy, Slot


class NoReplica(RuntimeError):
    """No replica is left that may serve the request; try again later."""


class Routing(Policy):
    """Chooses a replica for each request. It sees only the replicas that may get one.

    `settings`: those that it registered; None if it has none. `random`: its source of chance.
    """

    def __init__(self, settings: Any, random: Random) -> None:
        self.settings, self.random = settings, random

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[Replica], now: float) -> Replica:
        """The replica for this request, one of `replicas`. Raises `NoReplica` if there is none.

        The caller then tells the replica of it (`Replica.sent`), before the next decision.
        """
        ...


#: The routing policies. Not one of the scheduler's slots: a router stands before several schedulers.
ROUTINGS: Slot[Routing] = Slot("routing", "jaxspec.sched.routing")


def routing_names() -> tuple[str, ...]:
    """The names of all policies."""
    ROUTINGS.load()
    return ROUTINGS.names


def make_routing(name: str, random: Random, settings: Mapping[str, Any] | None = None) -> Routing:
    """A policy by its name. `settings`: those that differ from its defaults. Raises `ValueError` for an unknown name,
    or settings that it does not have or that are out of range."""
    if name not in routing_names():
        raise ValueError(f"routing: {name} is not one of {', '.join(routing_names())}")
    section = ROUTINGS.section_types.get(name)
    if section is None and settings:
        raise ValueError(f"routing: {name} has no settings")
    return ROUTINGS[name](None if section is None else section(**(settings or {})), random)


def some(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """The replicas. Raises `NoReplica` if there are none."""
    if not replicas:
        raise NoReplica("no replica is left that may serve a request")
    return replicas
