"""Needs Ray. The Ray Serve application: ingresses that speak HTTP, and replicas of the engine behind them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pkgutil import resolve_name
from random import Random
from typing import Any, cast

from fastapi import FastAPI
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from ray.serve.schema import LoggingConfig  # pyright: ignore[reportMissingImports]

from jaxspec.config import EngineConfig
from jaxspec.deploy.address import Address
from jaxspec.deploy.addressed_router import AddressedRouter
from jaxspec.deploy.echo import Echo
from jaxspec.deploy.lengths import ExpectedLengths
from jaxspec.deploy.load import Load
from jaxspec.deploy.messages import Facts, Message, Refused, Submission
from jaxspec.deploy.ray_fleet import RayFleet
from jaxspec.deploy.remote_engine import RemoteEngine
from jaxspec.deploy.replica import Replica
from jaxspec.deploy.router_metrics import RouterCollector
from jaxspec.deploy.settings import DeploySettings
from jaxspec.engine.engine import Engine
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.sched.routing import make_routing
from jaxspec.sched.slots import PREDICTORS
from jaxspec.serve.app import MEGABYTE, ServerOptions, create_app

log = logging.getLogger(__name__)

#: Seconds that an ingress waits for the first replica, which may have to load and compile a model.
_FIRST_REPLICA = 3600.0
#: Calls of an ingress at a time.
_CALLS = 4096
#: Calls of a replica: its engine's queue is the limit. Ray Serve's would keep questions for its load waiting behind
#: requests that go on there from a lost replica.
_UNLIMITED = 100_000


class RayReplica:
    """A replica as an actor. Every call begins with the address that it is meant for."""

    def __init__(self, settings: DeploySettings) -> None:
        self._replica = self._make(settings.engine_config())
        self._name = serve.get_replica_context().replica_id.unique_id

    def _make(self, config: EngineConfig) -> Replica | Echo:
        engine = Engine(config)
        engine.start()
        return Replica(engine)

    def _is_meant(self, address: Address) -> bool:
        return address.replica is None or address.replica == self._name

    async def facts(self, address: Address) -> Facts:
        return self._replica.facts()

    async def load(self, address: Address) -> Load | None:
        """None if another replica is meant."""
        return await self._replica.load() if self._is_meant(address) else None

    async def generate(self, address: Address, submission: Submission) -> AsyncGenerator[Message, None]:
        """See `Replica.generate`."""
        if not self._is_meant(address):
            yield Refused("absent")
            return
        async with aclosing(self._replica.generate(submission)) as messages:  # a cancelled call closes it at once
            async for message in messages:
                yield message

    async def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises."""
        self._replica.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._replica.scaling_stats()

    def __del__(self) -> None:
        if (replica := getattr(self, "_replica", None)) is not None:
            replica.shutdown()


class RayEcho(RayReplica):
    """An echo as an actor, for `jaxspec.bench router`."""

    def _make(self, config: EngineConfig) -> Echo:
        return Echo(config)


@serve.ingress()
class Ingress:
    """The server's routes, before an engine whose steps run in the replicas. It loads no weights."""

    async def __init__(self, settings: DeploySettings, replicas: DeploymentHandle[Any]) -> None:
        fleet = RayFleet(replicas)
        facts = await asyncio.wait_for(fleet.facts(), _FIRST_REPLICA)
        model = await asyncio.to_thread(load_model, facts.config.model, facts.config.revision)
        lengths = _lengths(settings, facts.config, model)
        routing = make_routing(settings.routing.policy, Random(), settings.routing.options)
        self._engine = RemoteEngine(fleet, facts, model.tokenizer, routing, settings.routing, lengths)
        await self._engine.replicas.poll()
        self._engine.start()
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        http = self._settings.http
        keys = tuple(os.environ.get("JAXSPEC_API_KEY", "").split())
        if not keys:
            log.warning("JAXSPEC_API_KEY is not set in the ingress's environment: it takes requests without a key")
        options = ServerOptions(
            keys, int(http.max_body_mb * MEGABYTE), allowed_origins=tuple(http.allowed_origins),
            root_path=http.root_path,
            keep_alive=http.sse_keep_alive, log_requests=http.enable_log_requests, ui=False,
            traces_endpoint=http.otlp_traces_endpoint,
        )  # fmt: skip
        engine = self._engine
        more = [RouterCollector(engine.replicas.router, engine.counts, engine.model_name)]
        return create_app(cast("Engine", engine), options, more)  # it has all that the routes use

    async def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            await engine.close()


def _lengths(settings: DeploySettings, config: EngineConfig, model: LoadedModel) -> ExpectedLengths:
    """Predicts lengths as the replicas' engine would."""
    reader, within = PREDICTORS.selected(config).reader, settings.routing.predict_within_s
    predictor = resolve_name(reader)(config, model, None) if reader and within else None
    return ExpectedLengths(predictor, lambda ids: model.tokenizer.decode(ids, skip_special_tokens=True), within)


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application: for `serve run jaxspec.deploy.app:build`, and for the configs of Ray Serve.

    `arguments`: those of `DeploySettings`. A config of Ray Serve can also set the options of the deployments `Replica`
    and `Ingress` in its own way. Raises `ConfigError`.
    """
    return application(DeploySettings.load(arguments))


def application(settings: DeploySettings, actor: type[RayReplica] = RayReplica) -> serve.Application:
    """The application with these settings. Raises `ConfigError`."""
    config = settings.engine_config()
    settings.check_extras()
    quiet = LoggingConfig(enable_access_log=False)  # each replica is asked for its load several times a second
    replica = {
        "max_ongoing_requests": _UNLIMITED,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "logging_config": quiet,
        "request_router_config": RequestRouterConfig(request_router_class=AddressedRouter),
    }
    ingress = {"max_ongoing_requests": _CALLS, "graceful_shutdown_timeout_s": settings.drain_s}
    # Options are no arguments of the actors: to change the number of replicas must not replace them.
    own = settings.model_copy(update={"replica": {}, "ingress": {}, "config": None, "engine": config.model_dump()})
    replicas = serve.deployment(actor, name="Replica", **{**replica, **settings.replica}).bind(own)
    return serve.deployment(Ingress, name="Ingress", **{**ingress, **settings.ingress}).bind(own, replicas)
