"""Replicas that are killed or stand still in the middle of streams: they go on elsewhere, with the same tokens."""

from __future__ import annotations

import asyncio

from helpers.ray_cluster import Answer, Cluster, mixed, streams
from helpers.serving import serving
from jaxspec import LLM


def check_200_streams_survive_a_killed_replica(cluster: Cluster, reference: LLM) -> None:
    requests = mixed(200)
    with serving(reference.engine) as url:
        expected = asyncio.run(streams(url, requests))
    assert all(answer.status == 200 and answer.finish_reason for answer in expected)
    events = sum(answer.pieces for answer in expected)
    cluster.deploy(2, give_up=6.0)
    before, killed, seen = cluster.metrics(), list[int](), [0]

    def told() -> None:
        seen[0] += 1
        if seen[0] == events // 2:
            killed.append(cluster.kill_one())

    found = asyncio.run(streams(cluster.url, requests, told))
    after = cluster.metrics()
    wrong = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a.outcome != b.outcome]
    assert not wrong, f"{len(wrong)} wrong, such as {_difference(expected[wrong[0]], found[wrong[0]])}"
    assert killed and killed[0] not in [process.pid for process in cluster.processes()]
    resumed = after["router_resumed_total"] - before["router_resumed_total"]
    print(f"\n200 streams, {seen[0]} events, {resumed:g} of them went on elsewhere")
    assert resumed > 0
    cluster.until(lambda: cluster.known() == 2)  # Ray Serve has replaced it


def check_a_replica_that_stands_still_is_taken_out_and_comes_back(cluster: Cluster, reference: LLM) -> None:
    requests = mixed(70, seed=4, tokens=(100, 140))  # longer: an engine is far ahead of its clients
    with serving(reference.engine) as url:
        expected = asyncio.run(streams(url, requests))
    cluster.deploy(2, give_up=6.0)
    before, events = cluster.metrics(), sum(answer.pieces for answer in expected)
    still, seen = cluster.processes()[0], [0]

    def told() -> None:
        seen[0] += 1
        if seen[0] == events // 5:
            still.suspend()

    try:
        found = asyncio.run(streams(cluster.url, requests, told))
        assert [a.outcome for a in found] == [a.outcome for a in expected]
        assert cluster.metrics()["router_resumed_total"] > before["router_resumed_total"]
        cluster.until(lambda: cluster.serves_with(1))
        again = asyncio.run(streams(cluster.url, requests[:7]))
        assert [a.outcome for a in again] == [a.outcome for a in expected[:7]]
    finally:
        still.resume()

    cluster.until(lambda: cluster.serves_with(2))  # on probation at first


def _difference(expected: Answer, found: Answer) -> str:
    return f"\n{expected.outcome}\n{found.outcome}"
