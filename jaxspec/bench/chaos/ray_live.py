"""Replicas on a local Ray cluster that are killed, stand still and are replaced under clients that
misbehave: no request may be lost with a replica."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from jaxspec.bench.chaos.clients import ANSWER, Live, check_idle, client, metrics
from jaxspec.bench.chaos.driver import DRAWS, Answer
from jaxspec.bench.chaos.live import damage
from jaxspec.bench.chaos.scenario import Asked
from jaxspec.bench.chaos.server import ENDS, SETTINGS
from jaxspec.config import ConfigError
from jaxspec.deploy.app import application
from jaxspec.deploy.ray_local import deploy, local_ray, processes
from jaxspec.deploy.settings import DeploySettings
from jaxspec.sched.routing import routing_names
from jaxspec.sched.slots import MEMORIES, ORDERS, PACES

#: Ray Serve's name of the application.
_NAME = "jaxspec"
#: Seconds until all replicas are there, also at first, when they compile. An idle machine takes a tenth.
_START = 300.0
#: Seconds of silence after which the requests of a replica go elsewhere, and for which a replica stands still.
_GIVE_UP, _STILL = 6.0, (1.0, 10.0, 20.0)
#: Least and most replicas.
_REPLICAS = (2, 3)
#: Seconds between two faults, and probability that the next one does not wait until all replicas are back.
_PAUSE, _IMPATIENT = (1.0, 10.0), 0.3


class Cluster:
    """The application on Ray Serve; what clients ask is its ingress."""

    def __init__(self, url: str, model: Path, random: Random) -> None:
        self.url, self.failing, self.ends, self.replicas = url, False, 0, _REPLICAS[0]
        self._model, self._random = model, random

    async def lost(self, ends: int) -> bool:
        """Requests fail with the ingress alone."""
        return self.ends != ends or self.failing

    async def deploy(self, replicas: int) -> None:
        """Start this many replicas and an ingress, instead of those that there are, with policies that are drawn."""
        self.replicas = replicas
        await asyncio.to_thread(deploy, self._application(replicas), _NAME)

    def _application(self, replicas: int) -> Any:
        for _ in range(DRAWS):
            with suppress(ConfigError):  # not all combinations are valid
                return application(self._settings(replicas))
        raise RuntimeError("no valid settings drawn")

    def _settings(self, replicas: int) -> DeploySettings:
        choice, actor = self._random.choice, {"ray_actor_options": {"num_cpus": 1}}
        policies = {
            "order": choice(ORDERS.names), "memory": choice(MEMORIES.names), "pace": choice(PACES.names),
            "predictor": choice(("none", "oracle")), "swap_space": choice((0.0, 1e-4)), "swap_dtype": "same",
        }  # fmt: skip
        routing = {
            "policy": choice(routing_names()), "give_up_after_s": _GIVE_UP,
            # What the machine is busy with makes replicas slow: none is left out for that, but for silence.
            "health": {"slow_factor": 1e6, "out_for": 1.0},
        }  # fmt: skip
        return DeploySettings.load({
            "engine": {**SETTINGS, **policies, "model": str(self._model), "served_model_name": ["tiny"]},
            "routing": routing, "ingress": actor,
            "replica": {**actor, "num_replicas": replicas, "health_check_period_s": 1},
        })  # fmt: skip

    async def complete(self, http: httpx.AsyncClient) -> None:
        """Wait until the ingress knows as many replicas as there should be. Raises `TimeoutError`."""
        deadline, known = time.monotonic() + _START, 0.0
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                known = (await metrics(http, self)).get("router_replicas", 0.0)
                # The ingress may not have noticed a death yet: Ray Serve has to have started another process.
                if known == self.replicas == len(processes("Replica", _NAME)):
                    self.failing = False
                    return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"{known:g} of {self.replicas} replicas are there after {_START:.0f} s")


async def serve(
    folder: Path, model: Path, pairs: Sequence[tuple[Asked, Answer]], random: Random, seconds: float, clients: int
) -> Live:
    """Let clients ask replicas for this long while one fault comes after the other."""
    live, cache, asking, stop = Live(), folder / "cache", list[asyncio.Task[None]](), asyncio.Event()
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    limits = httpx.Limits(max_connections=4 * clients)
    with local_ray(16, {"JAXSPEC_CACHE": str(cache)}) as url:
        async with httpx.AsyncClient(timeout=ANSWER, limits=limits) as http:
            cluster = Cluster(url, model, random)
            try:
                await cluster.deploy(_REPLICAS[0])
                await cluster.complete(http)
                asking = [
                    asyncio.create_task(client(live, http, [cluster], pairs, Random(random.random()), stop))
                    for _ in range(clients)
                ]
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    await asyncio.sleep(random.uniform(*_PAUSE))
                    await _fault(live, http, cluster, cache, random)
                    if cluster.failing or random.random() > _IMPATIENT:
                        await cluster.complete(http)
                stop.set()
                await asyncio.wait_for(asyncio.gather(*asking), ANSWER)
                await cluster.complete(http)
                await check_idle(live, http, cluster)
                await _count(live, http, cluster)
            except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
                live.failures.append(f"{type(error).__name__}: {error}")
            finally:
                for task in asking:
                    task.cancel()
    return live


async def _fault(live: Live, http: httpx.AsyncClient, cluster: Cluster, cache: Path, random: Random) -> None:
    kind = random.choice(("SIGKILL", "SIGKILL", "stands still", "new version", "SIGKILL of the ingress"))
    found = processes("Ingress" if kind.endswith("ingress") else "Replica", _NAME)
    process = random.choice(found) if found else None
    if process is None:  # the last one is not replaced yet
        return
    if kind in ("new version", "SIGKILL of the ingress"):
        await _count(live, http, cluster)  # before the ingress goes, with its counters
    if kind == "new version":
        await cluster.deploy(random.randint(*_REPLICAS))
    elif kind == "stands still":
        await _stand_still(process, random.choice(_STILL))
    else:
        if kind == "SIGKILL of the ingress":
            cluster.failing, cluster.ends = True, cluster.ends + 1
        for _ in range(random.choice((0, 1, 5))):
            if damaged := damage(cache, random):
                live.faults[damaged] += 1
        with suppress(psutil.NoSuchProcess):
            process.kill()
            await asyncio.to_thread(process.wait, ENDS)
    live.faults[kind] += 1


async def _stand_still(process: psutil.Process, seconds: float) -> None:
    """Stop the process with a signal, and continue it."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            process.resume()


async def _count(live: Live, http: httpx.AsyncClient, cluster: Cluster) -> None:
    """Add what went on at another replica since the ingress began."""
    with suppress(httpx.HTTPError):
        live.resumed += int((await metrics(http, cluster)).get("router_resumed_total", 0.0))
