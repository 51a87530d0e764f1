"""The draft rounds of a micro-batch: which drafters draft for which request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.assignment import Assignment
from jaxspec.sched.spec.calibration import AcceptanceRecord
from jaxspec.sched.spec.depth import DepthController
from jaxspec.sched.spec.drafter import ROUND, Drafter, DrafterFailed, Proposal, Proposed, SamplingOf
from jaxspec.sched.spec.trees.policy import TreePolicy


class Proposals:
    """Asks the drafters for candidates.

    Free drafters draft for every request. Of the others, one drafts for a request: the one that is expected to be
    fastest for it, if more of its nodes should be accepted than of the free ones. If it has no candidates, the next
    best one drafts. With an `assignment`, only the assigned drafter drafts, free or not.

    `controllers` hold the drafters' depth and width; `record` is a request's acceptance record with a drafter.
    `failures`: by drafter and work, how often it has failed without succeeding in between.
    """

    def __init__(
        self, drafters: Sequence[Drafter], controllers: Sequence[DepthController], policy: TreePolicy,
        assignment: Assignment | None, record: Callable[[Request, int], AcceptanceRecord],
        failures: Counter[tuple[int, str]],
    ) -> None:  # fmt: skip
        self._drafters, self._controllers, self._policy = drafters, controllers, policy
        self._assignment, self._record, self._failures = assignment, record, failures
        #: The drafters that draft for every request, because that takes next to no time, and the others (indices).
        self.free = [i for i, d in enumerate(drafters) if d.free and assignment is None]
        self.others = [i for i in range(len(drafters)) if i not in self.free]

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, room: int) -> list[Proposed]:
        """The proposals for these requests in their order, at most one of a free drafter and one of another for each.

        `room`: draft nodes that fit.
        """
        free = self._propose_free(scheduled, sampling)
        asking = [s for s in scheduled if self._asks_others(s.request, free.get(s.request.id))]
        others = self._propose_others(asking, sampling, room) if asking else {}
        if not self._policy.merges:
            free = {name: p for name, p in free.items() if name not in others}
        names = [s.request.id for s in scheduled]
        return [p for name in names for p in (free.get(name), others.get(name)) if p is not None]

    def _propose_free(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> dict[str, Proposed]:
        """By request id. A request that another drafter probes gets none, so that the probe's nodes are verified."""
        found: dict[str, Proposed] = {}
        others = [self._controllers[i] for i in self.others]
        for i in self.free:
            controller = self._controllers[i]
            batch = [
                s
                for s in scheduled
                if controller.drafts_for(s.request.id)
                and s.request.id not in found
                and self._drafters[i].serves(s.request)
                and not any(c.probing and c.drafts_for(s.request.id) for c in others)
            ]
            if not batch:
                continue
            levels = min(controller.levels, max(s.levels for s in batch))
            with self.blaming(i):
                proposal = self._drafters[i].propose(batch, sampling, levels, controller.width, controller.least)
                _collect(found, i, controller.width, batch, levels, proposal)
        return found

    def _asks_others(self, request: Request, free: Proposed | None) -> bool:
        """Whether more nodes of a drafter that is not free should be accepted than of the free ones."""
        others = [i for i in self._active(request) if i in self.others]
        if free is None or not others:
            return bool(others)
        expected = self._controllers[free.drafter].expected_of(free.candidates, self._record(request, free.drafter))
        return any(self._controllers[i].expected_accepted(self._record(request, i)) > expected for i in others)

    def _propose_others(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, room: int
    ) -> dict[str, Proposed]:
        """By request id; the cheapest drafters draft first.

        A round whose requests get even shares of the room drafts no levels beyond those, unless they take no time.
        """
        count = len(scheduled)
        preferred = {
            s.request.id: [i for i in self._preferences(s.request, count) if i in self.others] for s in scheduled
        }
        found: dict[str, Proposed] = {}
        order = [i for i in self.others if self._drafters[i].ready]
        order.sort(key=self._base_cost)
        started: dict[int, tuple[Sequence[ScheduledRequest], int, Proposal]] = {}
        # The second pass is for requests that a more expensive drafter had no candidates for.
        for i in (*order, *order):
            controller = self._controllers[i]
            left = [s for s in scheduled if s.request.id not in found]
            batch = [s for s in left if preferred[s.request.id][:1] == [i]]
            if not batch or i in started:  # one round a step
                continue
            levels = min(controller.levels, max(s.levels for s in batch))
            share = max(1, room // len(batch))
            if not self._policy.shares_room and share < levels:
                seconds = [self._drafters[i].seconds(len(batch), 0, n, controller.width) for n in (share, levels)]
                levels = share if seconds[0] < seconds[1] else levels
            if self._assignment:
                self._assignment.count_switches(i, batch)
            with self.blaming(i):
                started[i] = batch, levels, self._drafters[i].propose(batch, sampling, levels, controller.width)
                if not self._runs_concurrently(i):
                    _collect(found, i, controller.width, *started[i], preferred)
        for i, proposal in started.items():
            if self._runs_concurrently(i):
                with self.blaming(i):
                    _collect(found, i, self._controllers[i].width, *proposal, preferred)
        return found

    @contextmanager
    def blaming(self, drafter: int, work: str = ROUND) -> Generator[None]:
        """Raise errors of a drafter's work as `DrafterFailed`, and count them until the same work succeeds. A round has
        several parts, so the caller says when it has `succeeded`."""
        try:
            yield
        except Exception as error:
            self._failures[drafter, work] += 1
            raise DrafterFailed(drafter, self._drafters[drafter].name, work, error) from error
        if work != ROUND:
            self._failures.pop((drafter, work), None)

    def succeeded(self, drafter: int) -> None:
        """A drafter's round has succeeded."""
        self._failures.pop((drafter, ROUND), None)

    def _base_cost(self, drafter: int) -> float:
        """Seconds of the drafter's smallest round."""
        return self._drafters[drafter].seconds(1, 0, 1, self._drafters[drafter].widths[0])

    def _runs_concurrently(self, drafter: int) -> bool:
        """Whether other drafters run meanwhile: it has its own device, and no other drafter takes what it leaves."""
        return self._assignment is not None and self._drafters[drafter].own_device

    def drafter_of(self, request: Request, requests: int) -> int | None:
        """Index of the drafter for this request in this step, with `requests` requests in the step; None: none.

        Of free drafters only if no other one drafts.
        """
        preferred = self._preferences(request, requests)
        return next(iter(sorted(preferred, key=lambda i: i in self.free)), None)

    def _active(self, request: Request) -> list[int]:
        """Drafters that may draft for the request in this step."""
        active = [i for i, c in enumerate(self._controllers) if c.drafts_for(request.id)]
        return [i for i in active if i == self._assignment.of(request)] if self._assignment else active

    def _preferences(self, request: Request, requests: int) -> list[int]:
        """Drafters that may draft for the request, best first: those that probe, then by expected speed for it.

        Ties keep the configured order.
        """
        active = self._active(request)
        if len(active) < 2:
            return active
        speed = {i: self._controllers[i].speed(requests, self._record(request, i)) for i in active}
        return sorted(active, key=lambda i: (not self._controllers[i].probing, -speed[i]))


def _collect(
    found: dict[str, Proposed], drafter: int, width: int, batch: Sequence[ScheduledRequest], levels: int,
    proposal: Proposal, preferred: Mapping[str, list[int]] | None = None,
) -> None:  # fmt: skip
    """Wait for a round of `levels` levels and add its proposals to `found`, cut to the levels that a request may have.

    Where it has none, the drafter is no longer `preferred`.
    """
    for s, c in zip(batch, proposal(), strict=True):
        if c is not None and len(c):
            found[s.request.id] = Proposed(s, drafter, c.truncated(s.levels) if s.levels < levels else c, width)
        elif preferred is not None:
            preferred[s.request.id].remove(drafter)
