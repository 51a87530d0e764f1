"""Several replicas behind a router, on one virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from jaxspec.sched.kv.page_pool import extend_keys
from jaxspec.sched.length import LengthSource
from jaxspec.sched.request import Request
from jaxspec.sched.routing.prefixes import MOST_PAGES, short_keys
from jaxspec.sched.routing.report import report_of
from jaxspec.sched.routing.request import RoutedRequest
from jaxspec.sched.routing.router import Router
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.ledger import Ledger
from jaxspec.sched.sim.simulator import Served, Simulation, Stuck, served
from jaxspec.sched.slots import PREDICTORS, SlotContext

#: Seconds between two reports of a replica.
REPORT_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class ClusterServed:
    """Results of a cluster's simulation; arrays are `[requests]` in the workload's order, or `[replicas]`."""

    served: Served
    #: The replica that each request was sent to.
    replica: np.ndarray
    #: Seconds in which each replica ran a step.
    busy: np.ndarray
    #: Decisions of the router, and the seconds that they took on the clock given; reports are not counted.
    decisions: int
    decision_seconds: float

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache of their replica."""
        cached = self.served.cached
        return float(cached.sum() / self.served.workload.input.sum()) if cached is not None and cached.size else 0.0

    @property
    def imbalance(self) -> float:
        """Seconds that the busiest replica ran, relative to their mean; 1 is even."""
        return float(self.busy.max() / self.busy.mean()) if self.busy.any() else 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """From `time` on, the replica of this index has another cost model, such as a slower one."""

    time: float
    replica: int
    cost: Cost


class _Node:
    """A replica: its simulation, and the requests that arrived during its step."""

    __slots__ = ("inbox", "running", "simulation", "wake")

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.inbox: list[Request] = []
        self.running = False
        #: When an idle replica looks again whether there is work, if no request arrives before.
        self.wake: float | None = None


class Cluster:
    """Serves a workload on `simulations`, one per replica, which share `ledger`; `router` has no replicas yet.

    Each replica reports every `interval` seconds, one after the other. A report reaches the router at once, and shows
    the scheduler as it was planned last and the requests that have arrived since. The router predicts output lengths as
    the replicas' configuration says, and the replica gets the prediction with the request. `changes` are of the
    replicas' speed. `clock` returns seconds, to measure how long decisions take.

    With one replica, the results are exactly those of `Simulation.run`.
    """

    def __init__(
        self, simulations: Sequence[Simulation], ledger: Ledger, router: Router, interval: float = REPORT_INTERVAL,
        changes: Sequence[Change] = (), clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        if not simulations or not interval > 0:
            raise ValueError("a cluster needs a replica, and a positive interval of reports")
        if any(simulation.ledger is not ledger for simulation in simulations):
            raise ValueError("the replicas must share the cluster's ledger")
        self.router = router
        self._ledger, self._interval, self._clock = ledger, interval, clock
        self._nodes = [_Node(simulation) for simulation in simulations]
        self._names = [str(i) for i in range(len(simulations))]
        self._place = {name: i for i, name in enumerate(self._names)}
        limits = simulations[0].scheduler.config
        self._lengths: LengthSource = PREDICTORS.build(SlotContext(limits.policy, limits.max_num_seqs))
        self._changes = sorted(changes, key=lambda change: change.time)
        #: (time, replica, whether its step ends; else it is to look again for work)
        self._events: list[tuple[float, int, bool]] = []
        self._replica = [-1] * len(ledger)
        self._reports = 0
        self._seconds = 0.0

    def run(self, advance: Callable[[], None] = lambda: None) -> ClusterServed:
        """Run until all requests are done; calls `advance` once per percent of requests done.

        Raises as `Simulation.run`, and `NoReplica`.
        """
        n, arrival = len(self._ledger), self._ledger.arrival
        coming = done = 0
        for name in self._names:
            self.router.add(name)
        for i in range(len(self._nodes)):
            self._report(i, 0.0)
        while done < n:
            now = min(
                self._events[0][0] if self._events else inf,
                arrival[coming] if coming < n else inf,
                self._changes[0].time if self._changes else inf,
            )
            if now == inf:
                waiting = sum(node.simulation.scheduler.num_waiting for node in self._nodes)
                raise Stuck(f"{waiting} requests wait, but no event is left to wake them")
            self._report_until(now)
            while self._changes and self._changes[0].time <= now:
                change = self._changes.pop(0)
                self._nodes[change.replica].simulation.cost = change.cost
            # Steps that end now, then requests that arrive now, and then new steps: as in `Simulation.run`.
            touched: dict[int, None] = {}
            ended = 0
            while self._events and self._events[0][0] <= now:
                time, i, ends = heappop(self._events)
                if ends:
                    ended += self._finish(i, now)
                if ends or self._nodes[i].wake == time:
                    touched[i] = None
            while coming < n and arrival[coming] <= now:
                touched[self._route(self._ledger.request(coming), now)] = None
                coming += 1
            for i in touched:
                self._begin(i, now)
            for _ in range(100 * done // n, 100 * (done + ended) // n):
                advance()
            done += ended
        return ClusterServed(
            served(self._ledger, [node.simulation for node in self._nodes]), np.array(self._replica),
            np.array([node.simulation.busy for node in self._nodes]), coming, self._seconds,
        )  # fmt: skip

    def _report_until(self, now: float) -> None:
        """All reports that are due before `now`. Nothing has happened since the last event."""
        count = len(self._nodes)
        while (due := (self._reports + 1) * self._interval / count) < now:
            self._report(self._reports % count, due)
            self._reports += 1

    def _report(self, i: int, now: float) -> None:
        node = self._nodes[i]
        self.router.update(self._names[i], report_of(node.simulation.scheduler, now, queued=node.inbox))

    def _route(self, request: Request, now: float) -> int:
        scheduler = self._nodes[0].simulation.scheduler
        if request.predicted_len is None:
            request.predicted_len = self._lengths.predict(request)
        pool, keys = scheduler.pool, request.page_keys
        if pool.enable_prefix_caching:
            pages = (request.prompt_len - 1) // pool.page_size
            extend_keys(keys, request.tokens, pool.page_size, min(pages, MOST_PAGES))
        routed = RoutedRequest(
            request.id, request.prompt_len, request.max_tokens, short_keys(keys), request.predicted_len, request.slo
        )
        begun = self._clock()
        replica = self.router.route(routed, now)
        self._seconds += self._clock() - begun
        i = self._place[replica.name]
        self._replica[int(request.id)] = i
        self._nodes[i].inbox.append(request)
        return i

    def _begin(self, i: int, now: float) -> None:
        """Start a step unless one runs."""
        node = self._nodes[i]
        if node.running:
            return
        node.wake = None
        for request in node.inbox:
            node.simulation.add(request, now)
        node.inbox.clear()
        if (end := node.simulation.begin(now)) is not None:
            node.running = True
            heappush(self._events, (end, i, True))
        elif (wake := node.simulation.scheduler.wake(now)) is not None:
            node.wake = wake
            heappush(self._events, (wake, i, False))

    def _finish(self, i: int, now: float) -> int:
        """The replica's step has ended. Returns the number of requests that finished."""
        node = self._nodes[i]
        node.running = False
        node.simulation.finish()
        for request in node.simulation.answered:
            self.router.first_token(str(request), now)
        for request in node.simulation.ended:
            self.router.ended(str(request), now)
        return len(node.simulation.ended)
