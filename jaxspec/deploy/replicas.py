"""The replicas that an ingress knows: who there is, how loaded they are, and when they were last heard of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from jaxspec.deploy.fleet import Fleet
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import ReplicaLost
from jaxspec.deploy.settings import RoutingSettings
from jaxspec.deploy.totals import total
from jaxspec.engine.metrics import EngineStats
from jaxspec.sched.routing import Health, Router, Routing

log = logging.getLogger(__name__)


class Replicas:
    """Keeps the `router` up to date. Used in one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        routing: Routing,
        settings: RoutingSettings,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._settings, self._clock = fleet, settings, clock
        self.router = Router(routing, Health(settings.health))
        self._loads: dict[str, Load] = {}
        self._heard: dict[str, float] = {}
        #: Those that will never answer again, as long as they are still listed.
        self._gone: set[str] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._latest = clock()  # when there was a replica that is gone, or when it began

    @property
    def none_for(self) -> float:
        """Seconds since there was a replica; 0 if there is one."""
        return 0.0 if self.router.replicas else self._clock() - self._latest

    def heard(self, name: str) -> float:
        """When a replica last reported; minus infinity: never."""
        return self._heard.get(name, float("-inf"))

    def stats(self) -> EngineStats:
        """Engine statistics summed up over all replicas, as last reported."""
        return total([load.stats for load in self._loads.values()])

    async def poll(self) -> None:
        """One round: who is there, how loaded each is, and then their health.

        Answers that take longer than a round come in later.
        """
        await self._ask_all()
        self.router.check(self._clock())

    async def _ask_all(self) -> None:
        limit = self._settings.report_every_s
        try:
            # Without a replica there are no calls that would tell of a new one.
            fresh = not self.router.replicas
            names = await asyncio.wait_for(self._fleet.names(fresh), self._settings.give_up_after_s)
        except (TimeoutError, ReplicaLost):
            return
        self._gone &= names
        for name in names - self.router.replicas.keys() - self._gone:
            log.info("replica %s has come", name)
            self.router.add(name)
        for name in self.router.replicas.keys() - names:
            log.info("replica %s is no longer listed", name)
            self._drop(name)
        for name in self.router.replicas.keys() - self._asking.keys():
            self._asking[name] = task = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _, name=name: self._asking.pop(name, None))
        if self._asking:
            await asyncio.wait([*self._asking.values()], timeout=limit)

    def remove(self, name: str) -> None:
        """A replica has died, or has stopped."""
        self._gone.add(name)
        if name in self.router.replicas:
            log.warning("replica %s is not there any more", name)
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.router.remove(name)
        self._latest = self._clock()
        self._loads.pop(name, None)
        self._heard.pop(name, None)

    async def _ask(self, name: str) -> None:
        asked = self._clock()
        try:
            load = await asyncio.wait_for(self._fleet.load(name), self._settings.give_up_after_s)
        except TimeoutError:
            return
        except ReplicaLost as lost:
            if lost.final:
                self.remove(name)
            return
        if name in self.router.replicas:
            self._heard[name] = self._clock()
        if load.health != "ok":
            self.remove(name)
        elif name in self.router.replicas:
            self._loads[name] = load
            # What was sent before the question is in the answer.
            self.router.update(name, replace(load.report, time=asked))
