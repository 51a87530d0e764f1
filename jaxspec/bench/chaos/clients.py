"""Clients that misbehave, and what they check: every whole answer is that of the request served alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from random import Random
from typing import Any, Protocol

import httpx

from jaxspec.bench.chaos.driver import Answer
from jaxspec.bench.chaos.scenario import Asked

#: Seconds for one answer, and until a server is idle after the last.
ANSWER, IDLE = 120.0, 60.0


class Target(Protocol):
    """A server that clients send requests to."""

    url: str
    #: Whether requests may fail now: none is sent.
    failing: bool
    #: How often something was done after which a request under way may fail.
    ends: int

    async def lost(self, ends: int) -> bool:
        """Whether a request may have failed that was sent when `ends` had this value."""
        ...


@dataclass
class Live:
    """What happened. failures: what was wrong, in words."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    #: How servers ended that lacked memory.
    ended_servers: Counter[str] = field(default_factory=Counter[str])
    #: How often a request went on at another replica with the output so far.
    resumed: int = 0


async def client(
    live: Live, http: httpx.AsyncClient, targets: Sequence[Target], pairs: Sequence[tuple[Asked, Answer]],
    random: Random, stop: asyncio.Event,
) -> None:  # fmt: skip
    """Ask one request after the other, in different ways."""
    while not stop.is_set():
        usable = [target for target in targets if not target.failing]
        if not usable:
            await asyncio.sleep(0.1)
            continue
        target, (asked, answer) = random.choice(usable), random.choice(pairs)
        way = random.choice(("plain", "plain", "stream", "stream", "leaves", "reads slowly", "sends slowly"))
        before, live.requests = target.ends, live.requests + 1
        try:
            text, reason = await asyncio.wait_for(_ask(http, target, asked, way, random), ANSWER)
        except TimeoutError:
            live.failures.append(f"{way}: no answer within {ANSWER:.0f} s")
            continue
        except (httpx.HTTPError, OSError, ValueError, EOFError) as error:
            lost = await target.lost(before)
            live.ended["lost with its server" if lost else "failed"] += 1
            if not lost:
                live.failures.append(f"{way}: {type(error).__name__}: {error}")
            continue
        live.ended[reason] += 1
        right = answer.text.startswith(text) if reason == "left" else (text, reason) == (answer.text, answer.reason)
        if reason == "503":
            right = await target.lost(before)
        if not right:
            live.failures.append(f"{way}: {reason} {text!r} for {answer.reason} {answer.text!r}")


def _body(asked: Asked, stream: bool) -> dict[str, Any]:
    p = asked.params
    return {
        "model": "tiny", "prompt": list(asked.prompt), "stream": stream, "max_tokens": p.max_tokens, "seed": p.seed,
        "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p, "ignore_eos": p.ignore_eos,
        "presence_penalty": p.presence_penalty, "frequency_penalty": p.frequency_penalty,
        "repetition_penalty": p.repetition_penalty, "logit_bias": {str(t): b for t, b in p.logit_bias.items()},
        "min_tokens": p.min_tokens, "stop": list(p.stop) or None,
        "include_stop_str_in_output": p.include_stop_str_in_output,
        "allowed_token_ids": None if p.allowed_token_ids is None else list(p.allowed_token_ids),
        "structured_outputs": p.structured_outputs and {p.structured_outputs.kind: _value(p.structured_outputs)},
    }  # fmt: skip


def _value(structure: Any) -> Any:
    return getattr(structure, structure.kind)


async def _ask(http: httpx.AsyncClient, target: Target, asked: Asked, way: str, random: Random) -> tuple[str, str]:
    """-> the text, and the finish reason or "503". Raises `httpx.HTTPError`, or `EOFError` for a broken stream."""
    url, body = f"{target.url}/v1/completions", _body(asked, way in ("stream", "leaves", "reads slowly"))
    if not body["stream"]:
        content: Any = json.dumps(body).encode()
        if way == "sends slowly":
            content = _slowly(content)
        got = await http.post(url, content=content, headers={"Content-Type": "application/json"})
        if got.status_code == 503:
            return "", "503"
        choice = got.raise_for_status().json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    text, reason, pieces = "", "", random.randint(0, 4)
    async with http.stream("POST", url, json=body) as got:
        if got.status_code == 503:
            return "", "503"
        if got.status_code != 200:
            raise EOFError(f"HTTP {got.status_code}: {(await got.aread())[:300]!r}")
        async for line in got.aiter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise EOFError(str(event["error"]))
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
            if way == "leaves" and (pieces := pieces - 1) < 0:
                return text, "left"
            if way == "reads slowly":
                await asyncio.sleep(random.choice((0.0, 0.05, 0.3)))
    if not reason:
        raise EOFError("the stream ended without a finish reason")
    return text, reason


async def _slowly(content: bytes) -> Any:
    """The body in ten pieces."""
    size = max(1, len(content) // 10)
    for i in range(0, len(content), size):
        yield content[i : i + size]
        await asyncio.sleep(0.05)


async def metrics(http: httpx.AsyncClient, target: Target) -> dict[str, float]:
    """The values of /metrics by name, without `jaxspec:` and summed up over labels."""
    values: defaultdict[str, float] = defaultdict(float)
    for line in (await http.get(f"{target.url}/metrics")).raise_for_status().text.splitlines():
        if line.startswith("jaxspec:"):
            name, value = line.removeprefix("jaxspec:").rsplit(" ", 1)
            values[name.partition("{")[0]] += float(value)
    return values


async def check_idle(live: Live, http: httpx.AsyncClient, target: Target) -> None:
    """Nothing runs, waits or holds pages any more, and nothing was compiled in a request's way."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "compilations_after_warmup_total")
    deadline, left = time.monotonic() + IDLE, dict[str, float]()
    while time.monotonic() < deadline:
        values = await metrics(http, target)
        left = {name: values.get(name, nan) for name in names if values.get(name) != 0}
        if not left:
            return
        await asyncio.sleep(0.2)
    live.failures.append(f"left over: {left}")
