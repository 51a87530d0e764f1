"""An engine whose steps run elsewhere: it has the engine's surface, and sends each request to one of the replicas."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from jaxspec.constraints.build import Constraints
from jaxspec.deploy.fleet import Fleet
from jaxspec.deploy.lengths import ExpectedLengths
from jaxspec.deploy.messages import Admitted, Facts, Outputs, Refused, ReplicaLost
from jaxspec.deploy.remote_request import RemoteRequest
from jaxspec.deploy.replicas import Replicas
from jaxspec.deploy.router_metrics import RoutingCounts
from jaxspec.deploy.settings import RoutingSettings
from jaxspec.engine.metrics import EngineStats
from jaxspec.errors import EngineDead, EngineDraining, InvalidRequest
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.sampling_params import SamplingParams, check_request
from jaxspec.sched.routing import NoReplica, Routing
from jaxspec.sched.slo import Slo

if TYPE_CHECKING:
    from jaxspec.models.load.tokenizer import Tokenizer

log = logging.getLogger(__name__)

#: Seconds between two looks whether a replica has come that may serve a request.
_LOOK = 0.1


class RemoteEngine:
    """Serves a model by its replicas. All of it runs in one event loop; `submit` and `cancel` are called there too.

    A request whose replica is lost goes on at another one, with the tokens that its client has as its beginning: as
    random numbers are keyed by seed and position, and each request has a seed, nothing is repeated, and nothing differs
    from what the lost replica would have sent.

    Args:
        fleet: reaches the replicas.
        facts: what all of them have told of their engine.
        routing: chooses one for a request.
        lengths: predicts output lengths before that.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        facts: Facts,
        tokenizer: Tokenizer,
        routing: Routing,
        settings: RoutingSettings | None = None,
        lengths: ExpectedLengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._facts, self._clock = fleet, facts, clock
        self._settings = settings or RoutingSettings()
        self.lengths = lengths or ExpectedLengths()
        self.tokenizer, self.config = tokenizer, facts.config
        self.model_names, self.model_name = facts.model_names, facts.model_names[0]
        self.max_model_len, self.default_sampling = facts.max_model_len, facts.default_sampling
        self.constraints = Constraints(tokenizer, facts.vocab_size)
        #: As those of `EngineLoop`, called in the event loop. No step is observed: they run elsewhere.
        self.observers: list[Callable[[RequestMetrics, str], None]] = []
        self.token_observers: list[Callable[[float, int], None]] = []
        self.first_token_observers: list[Callable[[RequestMetrics], None]] = []
        self.step_observers: list[Callable[[int], None]] = []
        self._requests: dict[str, RemoteRequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.replicas = Replicas(fleet, routing, self._settings, clock)
        self.counts = RoutingCounts()
        # Not by the engine's seed: all ingresses would give their requests the same seeds.
        self._random = np.random.default_rng()
        self._draining = False
        self._watch: asyncio.Task[None] | None = None

    # -- the engine's surface ------------------------------------------------------------------------------------------

    @property
    def health(self) -> str:
        """ok, draining, or dead when there has been no replica for longer than requests wait for one."""
        if self._draining:
            return "draining"
        return "ok" if self.replicas.none_for <= self._settings.patience_s else "dead"

    @property
    def failure(self) -> str | None:
        """Why it is dead."""
        return "no replica is running" if self.health == "dead" else None

    def start(self) -> None:
        """Begin to watch the replicas and to predict lengths. To be called in the event loop."""
        self.lengths.start()
        self._watch = asyncio.get_running_loop().create_task(self._keep_watch(), context=contextvars.Context())

    async def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, give the others `timeout` seconds to finish, and stop. The rest are aborted."""
        self._draining = True
        if self._tasks and timeout > 0:
            await asyncio.wait([*self._tasks.values()], timeout=timeout)
        for task in (*self._tasks.values(), *([self._watch] if self._watch else [])):
            task.cancel()
        self.lengths.close()
        self.constraints.close()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_output: Callable[[OutputDelta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        slo: Slo | None = None,
        predict: bool = False,
        tenant: str = "",
    ) -> str:
        """As `Engine.submit`. What the replicas decide comes later: the last delta is then `refused` by them all, or by
        one for a reason that holds for all.

        Raises `InvalidRequest`, `EngineDraining`.
        """
        max_tokens = check_request(prompt_ids, params, self._facts.vocab_size, self.max_model_len)
        if self._draining:
            raise EngineDraining("the server is shutting down")
        id = request_id or uuid4().hex
        if id in self._requests:
            raise InvalidRequest("request_id", f"request {id!r} is already running")
        if params.seed is None:
            params = replace(params, seed=int(self._random.integers(0, 2**63)))
        request = RemoteRequest(
            id, prompt_ids, params, on_output, self._ended, max_tokens=max_tokens, page_size=self.config.page_size,
            arrival=self._clock(), priority=priority, slo=self.config.slo.slo if slo is None else slo, predict=predict,
            tenant=tenant,
        )  # fmt: skip
        self._requests[id] = request
        # In a context of its own: Ray Serve would take what belongs to one HTTP request for one call.
        task = asyncio.get_running_loop().create_task(self._serve(request), context=contextvars.Context())
        self._tasks[id] = task
        task.add_done_callback(partial(self._done, request))
        return id

    def cancel(self, request_id: str) -> None:
        """End a request early; its last delta has finish reason "abort". Unknown ids are ignored."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def stats(self) -> EngineStats:
        """Engine statistics summed up over all replicas, as last reported."""
        return self.replicas.stats()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _done(self, request: RemoteRequest, task: asyncio.Task[None]) -> None:
        """Clean up after a request's task, which has ended or was cancelled before it began."""
        now = self._clock()
        self.replicas.router.ended(request.id, now)
        del self._requests[request.id], self._tasks[request.id]
        if task.cancelled():
            request.end("abort", now)
        elif (error := task.exception()) is not None:
            log.error("request %s failed", request.id, exc_info=error)
            request.end("error", now, f"the request failed: {type(error).__name__}: {error}")

    def _ended(self, request: RemoteRequest, reason: str) -> None:
        """Tell the observers that a request ends; its last delta is delivered after this."""
        if reason == "stop":
            self.lengths.ended(len(request.tokens))
        self._tell(self.observers, request.metrics, reason)

    async def _serve(self, request: RemoteRequest) -> None:
        """Send it to one replica after the other until it has ended."""
        request.expected = await self.lengths.of(request.prompt, request.max_tokens)
        none_since: float | None = None
        while not request.ended:
            if (name := self._place(request)) is not None:
                none_since, before = None, len(request.tokens)
                refused = await self._attempt(request, name)
                if len(request.tokens) > before:
                    request.lost = 0
                if refused is not None and not request.ended:
                    self._judge(request, name, refused)
            elif request.refused_by:
                self._refuse(request, next(iter(request.refused_by.values())))
            else:
                now = self._clock()
                none_since = now if none_since is None else none_since
                if now - none_since >= self._settings.patience_s:
                    self._refuse(request, EngineDead("no replica is running"))
                else:
                    await asyncio.sleep(_LOOK)

    def _place(self, request: RemoteRequest) -> str | None:
        """The replica for its next attempt; None if there is none at the moment."""
        now = self._clock()
        self.replicas.router.ended(request.id, now)
        try:
            return self.replicas.router.route(request.routed(), now, request.excluded).name
        except NoReplica:
            request.lost_with.clear()  # better one that was lost for a while than none
            return None

    def _judge(self, request: RemoteRequest, name: str, refused: Refused) -> None:
        """What an attempt that has not ended the request means for the next one."""
        if refused.reason == "invalid":
            self._refuse(request, refused.error)
        elif refused.reason == "absent":
            self.replicas.remove(name)
        elif refused.reason == "lost":
            log.warning("request %s was lost with %s: %s", request.id, name, refused.message)
            self.counts.lost += 1
            request.lost += 1
            request.lost_with.add(name)
            if request.lost >= self._settings.max_attempts:
                self._refuse(request, EngineDead(f"{request.lost} replicas were lost: {refused.message}"))
        else:
            self.counts.refused += 1
            request.refused_by[name] = refused.error

    def _refuse(self, request: RemoteRequest, error: Exception) -> None:
        request.end("error", self._clock(), refused=error)

    async def _attempt(self, request: RemoteRequest, name: str) -> Refused | None:
        """Have a replica serve it. None: it has ended there, else why not."""
        request.replica, request.heard = name, self._clock()
        self.counts.sent += 1
        self.counts.resumed += bool(request.tokens)
        request.reading = reading = asyncio.create_task(self._read(request, name))
        try:
            await asyncio.wait((reading,))
        finally:
            request.replica = request.reading = None
            reading.cancel()
        return Refused("lost", "it did not answer") if reading.cancelled() else reading.result()

    async def _read(self, request: RemoteRequest, name: str) -> Refused | None:
        try:
            async with aclosing(self._fleet.generate(name, request.submission(self._clock()))) as messages:
                async for message in messages:
                    request.heard = now = self._clock()
                    match message:
                        case Admitted():
                            request.admitted = True
                            request.refused_by.clear()  # none may refuse it any more
                        case Refused():
                            return message
                        case Outputs() if not request.ended:
                            self._take(request, message, now)
                        case _:
                            pass
        except ReplicaLost as lost:
            if lost.final:
                self.replicas.remove(name)
            return Refused("lost", str(lost))
        return None if request.ended else Refused("lost", "it stopped in the middle")

    def _take(self, request: RemoteRequest, outputs: Outputs, now: float) -> None:
        for count, seconds in request.take(outputs, now):
            if seconds is None:
                self._tell(self.first_token_observers, request.metrics)
            else:
                self._tell(self.token_observers, seconds / count, count)
        if request.tokens:
            self.replicas.router.first_token(request.id, now)

    # -- the replicas --------------------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        await asyncio.gather(self._poll(), self._watch_silence())

    async def _poll(self) -> None:
        while True:
            try:
                await self.replicas.poll()
            except Exception:  # the next round may succeed
                log.exception("asking the replicas for their load failed")
            await asyncio.sleep(self._settings.report_every_s)

    async def _watch_silence(self) -> None:
        """Not between polls: these wait long where no replica is listed."""
        last = self._clock()
        while True:
            await asyncio.sleep(self._settings.report_every_s)
            now, before = self._clock(), last
            last = now
            # After a longer round the ingress itself stood still: what it did not hear tells nothing.
            if now - before < self._settings.give_up_after_s / 2:
                self.give_up()

    def give_up(self) -> None:
        """Send requests elsewhere whose replicas have not been heard of for too long."""
        now = self._clock()
        for request in self._requests.values():
            if request.replica is None or request.reading is None:
                continue
            heard = max(request.heard, self.replicas.heard(request.replica))
            if now - heard > self._settings.give_up_after_s:
                request.reading.cancel()

    def _tell(self, observers: Sequence[Callable[..., None]], *event: Any) -> None:
        for observe in observers:
            try:
                observe(*event)
            except Exception:
                log.exception("an observer failed")
