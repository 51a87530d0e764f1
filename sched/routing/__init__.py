"""Routing: which replica of the engine serves a request. Pure Python; time is an argument."""

from jaxspec.sched.routing.health import Health, HealthSettings
from jaxspec.sched.routing.prefixes import prefix_keys
from jaxspec.sched.routing.replica import Replica
from jaxspec.sched.routing.report import ReplicaReport, report_of
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.router import Router
from jaxspec.sched.routing.routing import NoReplica, Routing, make_routing, routing_names

__all__ = [
    "Health",
    "HealthSettings",
    "NoReplica",
    "Replica",
    "ReplicaReport",
    "RoutedRequest",
    "Router",
    "Routing",
    "make_routing",
    "prefix_keys",
    "report_of",
    "routing_names",
]
