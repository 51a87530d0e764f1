"""Replicas come and go under load: no request is lost, and those of a replica that is to stop end there."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import httpx

from helpers.ray_cluster import LIMIT, Answer, Cluster, Json, mixed, stream, streams
from helpers.serving import serving
from jaxspec import LLM

SCALING: Json = {
    "autoscaling_config": {
        "min_replicas": 1, "max_replicas": 2, "look_back_period_s": 2, "metrics_interval_s": 0.5,
        "upscale_delay_s": 0.5, "downscale_delay_s": 3,
        "policy": {
            "policy_function": "jaxspec.deploy.autoscaling:Scaling", "policy_kwargs": {"target_waiting_tokens": 40},
        },
    }
}  # fmt: skip


def check_scaling_under_load_loses_nothing(cluster: Cluster, reference: LLM) -> None:
    requests = mixed(42, seed=1)
    with serving(reference.engine) as url:
        expected = asyncio.run(streams(url, requests))
    cluster.deploy(None, **SCALING)
    cluster.until(lambda: cluster.known() == 1)

    async def load(at_once: int, replicas: int) -> list[tuple[int, Answer]]:
        """Streams, a fixed number at once, until there is the wanted number of replicas."""
        found: list[tuple[int, Answer]] = []
        numbers, enough = count(), asyncio.Event()

        async def one_after_the_other(client: httpx.AsyncClient) -> None:
            while not enough.is_set():
                i = next(numbers) % len(requests)
                found.append((i, await stream(client, *requests[i])))

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=LIMIT, limits=limits) as client:
            tasks = [asyncio.create_task(one_after_the_other(client)) for _ in range(at_once)]
            try:
                await asyncio.to_thread(cluster.until, lambda: cluster.known() == replicas)
            finally:
                enough.set()
                await asyncio.gather(*tasks)
        return found

    lost = cluster.metrics()["router_lost_total"]
    for at_once, replicas in ((28, 2), (6, 1)):
        found = asyncio.run(load(at_once, replicas))
        print(f"\n{len(found)} streams, {at_once} at once, until there were {replicas} replicas")
        wrong = [(expected[i].outcome, answer.outcome) for i, answer in found if answer.outcome != expected[i].outcome]
        assert not wrong, f"{len(wrong)} wrong, such as {wrong[0]}"
    assert cluster.metrics()["router_lost_total"] == lost, "a replica that is to stop finishes its requests"


def check_a_new_version_loses_nothing(cluster: Cluster, reference: LLM) -> None:
    """Replicas and ingress are replaced while they serve; the old ones finish first."""
    requests: list[tuple[str, Json]] = []
    for route, body in mixed(14, seed=2):
        longer: dict[str, Any] = {} if "response_format" in body else {"max_tokens": 150}
        requests.append((route, {**body, **longer}))
    with serving(reference.engine) as url:
        expected = asyncio.run(streams(url, requests))
    cluster.deploy(2)
    first = {process.pid for process in cluster.processes()}

    async def main() -> list[Answer]:
        begun = asyncio.Event()
        asked = asyncio.create_task(streams(cluster.url, requests, begun.set))
        await begun.wait()
        await asyncio.to_thread(cluster.deploy, 2, again=True)
        return await asked

    found = asyncio.run(main())
    assert [a.outcome for a in found] == [a.outcome for a in expected]
    cluster.until(lambda: len(cluster.processes()) == 2)
    assert not first & {process.pid for process in cluster.processes()}
