"""Needs Ray. Echo replicas and an ingress on a local Ray cluster, for `jaxspec.bench router`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import httpx
from ray import serve  # pyright: ignore[reportMissingImports]

from jaxspec.deploy.address import Address
from jaxspec.deploy.app import RayEcho, application
from jaxspec.deploy.messages import Submission
from jaxspec.deploy.ray_fleet import RayFleet
from jaxspec.deploy.ray_local import deploy, local_ray
from jaxspec.deploy.settings import DeploySettings, RoutingSettings
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.slo import NONE

#: A request to an echo, for one token.
Ask = Callable[[list[int]], Awaitable[None]]
_TIMEOUT = 60.0


@contextmanager
def echoes(model: str, replicas: int) -> Iterator[tuple[RayFleet, Ask, Ask]]:
    """Start this many echoes and an ingress. -> the fleet; a request by Ray Serve's handle alone, and one over HTTP.

    Stops Ray at the end. Ray runs as many actors as asked for, whatever cores there are.
    """
    with local_ray(replicas + 1) as url:
        settings = DeploySettings(
            engine={"model": model}, routing=RoutingSettings(predict_within_s=0),
            replica={"num_replicas": replicas, "ray_actor_options": {"num_cpus": 1}},
            ingress={"ray_actor_options": {"num_cpus": 1}},
        )  # fmt: skip
        deploy(application(settings, RayEcho), "echo")
        handle = serve.get_deployment_handle("Replica", "echo")
        streams = handle.options(stream=True)
        client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT)

        async def direct(prompt: list[int]) -> None:
            submission = Submission("x", tuple(prompt), SamplingParams(temperature=0, max_tokens=1), 0, NONE, False, "")
            async for _ in streams.generate.remote(Address(None), submission):
                pass

        async def http(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        yield RayFleet(handle), direct, http
