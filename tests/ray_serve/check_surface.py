"""What clients see is what the single server shows: errors, refusals, and that leaving ends a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import yaml
from openai import OpenAI

from helpers.paths import ROOT
from helpers.ray_cluster import LIMIT, Cluster, mixed, streams
from helpers.serving import error_of, serving
from jaxspec import LLM


def check_the_configs_can_be_built() -> None:
    from ray.serve.schema import ServeDeploySchema  # pyright: ignore[reportMissingImports]

    from jaxspec.deploy.app import build

    files = sorted((ROOT / "configs" / "deploy").glob("*.yaml"))
    assert len(files) > 1
    for file in files:
        config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
        for application in config.applications:
            assert application.import_path == "jaxspec.deploy.app:build"
            build({**application.args, "config": str(ROOT / application.args["config"])})
            assert {deployment.name for deployment in application.deployments} == {"Replica", "Ingress"}


def check_errors_and_answers_are_those_of_the_single_server(cluster: Cluster, reference: LLM) -> None:
    cluster.deploy(2)
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "owl", "model": "other"}),
        ("/v1/completions", {"prompt": "owl", "max_tokens": 100_000}),
        ("/v1/completions", {"prompt": "owl", "stop": ""}),
        ("/v1/completions", {"prompt": "owl", "regex": "("}),
        ("/v1/completions", {"prompt": "owl", "slo": {"ttft_ms": 1e-6}}),  # which only a replica knows to be impossible
        ("/v1/nothing", {}),
        ("/v1/completions", {"prompt": ["owl", "fox"], "n": 2, "seed": 1, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "owl", "prompt_logprobs": 1, "temperature": 0}),
        ("/v1/responses", {"input": "owl", "temperature": 0}),
        ("/tokenize", {"prompt": "owl"}),
    ]
    with serving(reference.engine) as url:
        for route, body in requests:
            here, there = (httpx.post(base + route, json=body, timeout=LIMIT) for base in (url, cluster.url))
            assert here.status_code == there.status_code, (route, body, there.text)
            if here.status_code == 200:
                assert _lasting(there.json()) == _lasting(here.json())
            elif "slo" in body:
                assert error_of(there)["param"] == error_of(here)["param"] == "slo.ttft_ms"
            else:
                assert error_of(there) == error_of(here)
    client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=LIMIT)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "owl"}], max_tokens=9, seed=1
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 9
    assert client.models.list().data[0].id == "tiny"
    health = httpx.get(f"{cluster.url}/health", timeout=LIMIT).json()
    assert health["status"] == "ok" and health["programs"]["ready"] > 0
    values = cluster.metrics()
    assert values["request_success_total"] > 0 and values["generation_tokens_total"] > 0


def check_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    cluster.deploy(2)
    before = cluster.metrics()["generation_tokens_total"]
    count, length = 32, 220

    async def leave(client: httpx.AsyncClient) -> None:
        body = {"prompt": "owl", "max_tokens": length, "ignore_eos": True, "stream": True, "temperature": 1.0}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return

    async def main() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=LIMIT, limits=limits) as client:
            await asyncio.gather(*(leave(client) for _ in range(count)))

    asyncio.run(main())
    cluster.until(lambda: cluster.metrics()["num_requests_running"] == 0)
    generated = cluster.metrics()["generation_tokens_total"] - before
    print(f"\n{generated:g} of {count * length} tokens were generated for clients that left")
    assert generated < count * length / 2


def check_the_client_is_refused_when_all_refuse(cluster: Cluster, reference: LLM) -> None:
    requests = mixed(80, seed=3)
    with serving(reference.engine) as url:
        expected = asyncio.run(streams(url, requests))
    cluster.deploy(2, {"max_num_seqs": 2, "max_queued_requests": 4})
    found = asyncio.run(streams(cluster.url, requests))
    statuses = Counter(answer.status for answer in found)
    print(f"\nstatuses: {dict(statuses)}")
    assert statuses.keys() == {200, 429} and statuses[200] >= 12
    for mine, theirs in zip(found, expected, strict=True):
        if mine.status == 200:
            assert mine.outcome == theirs.outcome
        else:
            assert mine.error is not None and mine.error["code"] == "queue_full"


def _lasting(body: Any) -> Any:
    """What does not differ between two answers to the same request."""
    if isinstance(body, dict):
        passing = {"id", "created", "created_at", "completed_at", "timings", "metrics"}
        return {name: _lasting(value) for name, value in body.items() if name not in passing}
    if isinstance(body, list):
        return [_lasting(value) for value in body]
    return round(body, 3) if isinstance(body, float) else body
