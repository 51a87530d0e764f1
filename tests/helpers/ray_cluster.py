"""The Ray Serve application with a tiny model, and requests to it over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import httpx
import psutil

from helpers.paths import GOLDEN

#: Seconds for what should happen within a few.
LIMIT = 300.0
Json = dict[str, Any]


class Cluster:
    """The deployed application."""

    ENGINE: ClassVar[Json] = {
        "model": str(GOLDEN / "llama"), "served_model_name": ["tiny"], "draft": ["suffix", "grammar"], "page_size": 16,
        "max_num_seqs": 16, "kv_cache_tokens": 4096, "token_buckets": [1, 16, 64], "max_num_batched_tokens": 64,
        "max_queued_requests": 256, "compile_in_background": False, "seed": 5,
    }  # fmt: skip

    def __init__(self, url: str) -> None:
        self.url = url
        self._deployed: Json | None = None

    def deploy(
        self, replicas: int | None = 2, engine: Json | None = None, again: bool = False, give_up: float = 60.0,
        **options: Any,
    ) -> None:  # fmt: skip
        """Deploy the application, unless it runs like that already, and wait until it has this many replicas.

        `again`: replace what runs. `give_up`: seconds after which a silent replica loses its requests; on a busy
        machine, one that compiles is silent for several. `options`: of the deployment of replicas.
        """
        from jaxspec.deploy.app import build
        from jaxspec.deploy.ray_local import deploy

        number = {} if replicas is None else {"num_replicas": replicas}
        # Slow is whatever the machine is busy with: no replica is taken out for that, but for silence.
        routing = {"health": {"slow_factor": 1e6, "out_for": 1.0}, "give_up_after_s": give_up}
        arguments = {
            "engine": self.ENGINE | (engine or {}), "routing": routing,
            "replica": {"ray_actor_options": {"num_cpus": 1}, "health_check_period_s": 1, **number, **options},
            "ingress": {"ray_actor_options": {"num_cpus": 1}},
        }  # fmt: skip
        if again or arguments != self._deployed:
            deploy(build(arguments), "jaxspec")
            self._deployed = arguments
        if replicas is not None:
            self.until(lambda: self.serves_with(replicas))

    def until(self, holds: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait until it holds."""
        end = time.monotonic() + limit
        while not holds():
            assert time.monotonic() < end, f"it did not happen within {limit:g} s"
            time.sleep(0.1)

    def metrics(self, labels: str = "") -> dict[str, float]:
        """Values of /metrics by name, summed up over all with these labels."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=LIMIT).text.splitlines():
            if line.startswith("jaxspec:") and labels in line:
                name, value = line.removeprefix("jaxspec:").rsplit(" ", 1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def known(self) -> int:
        """Replicas that the ingress knows."""
        return int(self.metrics().get("router_replicas", 0))

    def healthy(self) -> int:
        """Those of them that get requests."""
        return int(self.metrics(labels='state="healthy"').get("router_replicas", 0))

    def serves_with(self, replicas: int) -> bool:
        """Whether this many replicas get requests.

        A replica that was silent, perhaps because the machine was busy, is on probation until it has answered a few
        requests, one at a time: without any it would stay there.
        """
        if self.healthy() != replicas:
            with suppress(httpx.HTTPError, json.JSONDecodeError):  # while replicas or the proxy are replaced
                asyncio.run(streams(self.url, mixed(7)))
        return self.healthy() == replicas

    def processes(self) -> list[psutil.Process]:
        """Those of the replicas."""
        from jaxspec.deploy.ray_local import processes

        return processes("Replica", "jaxspec")

    def kill_one(self) -> int:
        """SIGKILL to a replica. -> its process id."""
        process = self.processes()[0]
        os.kill(process.pid, signal.SIGKILL)
        return process.pid


@dataclass
class Answer:
    """What a client got of one stream."""

    status: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Json | None = None
    error: Json | None = None
    #: Events with text.
    pieces: int = 0

    def take(self, event: Json) -> None:
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.text += text
            self.pieces += bool(text)
            self.tokens += choice.get("token_ids") or ()
            entries = choice.get("logprobs") or {}
            self.logprobs += entries.get("tokens") or [entry["token"] for entry in entries.get("content") or ()]
            assert self.finish_reason is None, "nothing follows the end"
            self.finish_reason = choice.get("finish_reason")

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What does not depend on the way that it came."""
        usage = self.usage or {}
        return (
            self.status, self.error, self.text, self.tokens, self.logprobs, self.finish_reason,
            usage.get("prompt_tokens"), usage.get("completion_tokens"),
        )  # fmt: skip


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["owl", "né", "fox"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def mixed(count: int, seed: int = 0, tokens: tuple[int, int] = (24, 48)) -> list[tuple[str, Json]]:
    """(route, body) of streams of all kinds, the same for a seed."""
    rng, kinds = Random(seed), ("greedy", "sampled", "json", "stop", "logprobs", "penalties", "min_tokens")
    out: list[tuple[str, Json]] = []
    for i in range(count):
        kind, text = kinds[i % len(kinds)], " ".join(rng.choices(("owl", "fox", "naïve", "of the", "won", "and"), k=6))
        body: Json = {"model": "tiny", "max_tokens": rng.randint(*tokens), "temperature": 0, "ignore_eos": True}
        match kind:
            case "sampled":
                body |= {"temperature": 1.0, "top_p": 0.95, "seed": i}
            case "json":
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
                body |= {"response_format": form, "temperature": 0.7, "seed": i, "ignore_eos": False}
            case "stop":
                body |= {"stop": [rng.choice("eoa"), "he"], "min_tokens": 12, "temperature": 1.2, "seed": i}
            case "penalties":
                body |= {"presence_penalty": 1.0, "repetition_penalty": 1.2, "temperature": 0.8, "seed": i}
            case "min_tokens":
                body |= {"min_tokens": 10, "ignore_eos": False, "temperature": 1.0, "seed": i}
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        if i % 2:
            logprobs = {"logprobs": True, "top_logprobs": 2} if kind == "logprobs" else {}
            messages = [{"role": "user", "content": text}]
            out.append(("/v1/chat/completions", {**body, **options, **logprobs, "messages": messages}))
        else:
            logprobs = {"logprobs": 2} if kind == "logprobs" else {}
            out.append(("/v1/completions", {**body, **options, **logprobs, "prompt": text}))
    return out


async def stream(client: httpx.AsyncClient, route: str, body: Json, told: Callable[[], None] | None = None) -> Answer:
    """The answer to one request; `told` is called after each event."""
    answer = Answer()
    async with client.stream("POST", route, json=body) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.take(json.loads(await response.aread()))
            return answer
        left = b""
        async for piece in response.aiter_bytes():
            *lines, left = (left + piece).split(b"\n")  # httpx would also split at line separators in the text
            for line in lines:
                if line.startswith(b"data: {"):
                    answer.take(json.loads(line.removeprefix(b"data: ")))
                    if told is not None:
                        told()
    return answer


async def streams(
    url: str, requests: list[tuple[str, Json]], told: Callable[[], None] | None = None, gap: float = 0.0
) -> list[Answer]:
    """The answers to all, asked at once or `gap` seconds apart."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT, limits=limits) as client:
        tasks: list[asyncio.Task[Answer]] = []
        for route, body in requests:
            tasks.append(asyncio.create_task(stream(client, route, body, told)))
            await asyncio.sleep(gap)
        return list(await asyncio.gather(*tasks))
