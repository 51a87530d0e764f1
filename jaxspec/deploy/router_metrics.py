"""Prometheus metrics of an ingress's routing, read on each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxspec.sched.routing import Router


@dataclass(slots=True)
class RoutingCounts:
    """Counted by the remote engine.

    sent     requests sent to a replica, each attempt counts
    lost     attempts whose replica was lost
    resumed  attempts that went on with tokens of a lost one
    refused  attempts that a replica refused
    """

    sent: int = 0
    lost: int = 0
    resumed: int = 0
    refused: int = 0


_HELP = {
    "sent": "Requests sent to a replica; each attempt counts.",
    "lost": "Attempts whose replica was lost.",
    "resumed": "Attempts that went on with the output of a lost replica.",
    "refused": "Attempts that a replica refused.",
}


class RouterCollector(Collector):
    """The counters, and the replicas by state of health."""

    def __init__(self, router: Router, counts: RoutingCounts, model_name: str) -> None:
        self._router, self._counts, self._labels = router, counts, [model_name]

    def collect(self) -> Iterator[Metric]:
        states = Counter(self._router.health.state(r).value for r in self._router.replicas.values())
        gauge = GaugeMetricFamily("jaxspec:router_replicas", "Replicas, by health.", labels=["model_name", "state"])
        for state, number in sorted(states.items()):
            gauge.add_metric([*self._labels, state], number)
        yield gauge
        for name, help in _HELP.items():
            counter = CounterMetricFamily(f"jaxspec:router_{name}", help, labels=["model_name"])
            counter.add_metric(self._labels, getattr(self._counts, name))
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering the collector reads no counters."""
        return iter(())
