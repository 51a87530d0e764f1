"""Real servers over HTTP: killed, stopped and started again, with damaged caches, a full disk and little memory, under
clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from jaxspec.bench.chaos.driver import Answer
from jaxspec.bench.chaos.scenario import Asked
from jaxspec.bench.chaos.server import STOP, Limit, Server, forget_programs

#: Seconds for one answer.
ANSWER = 120.0
#: Seconds between two faults.
PAUSE = 12.0
#: Bytes that a file can have on a full disk: no program fits, a profile may.
FILES = (0, 1000, 20_000)
#: Bytes of data with which a server may start or not, and that a server may use more than it does.
LITTLE, SPARE = (150 << 20, 600 << 20), (0, 4 << 20, 16 << 20, 64 << 20)


@dataclass
class Live:
    """What happened. failures: what was wrong, in words."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    #: How servers ended that lacked memory.
    ended_servers: Counter[str] = field(default_factory=Counter[str])


def damage(folder: Path, random: Random) -> str | None:
    """Replace a random file of the cache by a damaged one. -> what kind; None if there is none. Programs that have the
    old one mapped keep it, as with any file that is replaced."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    path = random.choice(files)
    data = bytearray(path.read_bytes())
    way = random.choice(("cut", "flip", "empty", "noise"))
    if way == "cut":
        data = data[: len(data) // 2]
    elif way == "flip":
        data[random.randrange(len(data))] ^= 0xFF
    else:
        data = bytearray(random.randbytes(200)) if way == "noise" else bytearray()
    new = path.with_suffix(".damaged")
    new.write_bytes(data)
    new.replace(path)
    return f"damaged {path.relative_to(folder).parts[0]}"


async def serve(
    folder: Path, model: Path, pairs: Sequence[tuple[Asked, Answer]], random: Random, seconds: float, clients: int
) -> Live:
    """Let clients ask two servers for this long while a fault happens every few seconds."""
    live, cache = Live(), folder / "cache"
    servers = [Server(model, cache, folder, i) for i in range(2)]
    stop, asking = asyncio.Event(), list[asyncio.Task[None]]()
    limits = httpx.Limits(max_connections=4 * clients)
    async with httpx.AsyncClient(timeout=ANSWER, limits=limits) as http:
        try:
            for server in servers:  # at once: both fill the cache
                server.start()
            await asyncio.gather(*(server.ready(http) for server in servers))
            asking = [
                asyncio.create_task(_client(live, http, servers, pairs, Random(random.random()), stop))
                for _ in range(clients)
            ]
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                await asyncio.sleep(PAUSE)
                await _fault(live, http, random.choice(servers), cache, random)
            stop.set()
            await asyncio.wait_for(asyncio.gather(*asking), ANSWER)
            for server in servers:
                if not server.short:
                    await _check_idle(live, http, server)
                await _end(live, server, signal.SIGTERM)
        except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
            states = [f"server {i} {server.state}" for i, server in enumerate(servers)]
            live.failures.append(f"{type(error).__name__}: {error}; {', '.join(states)}")
        finally:
            for task in asking:
                task.cancel()
            for server in servers:
                server.kill()
    for log in (log for server in servers for log in server.logs):
        if "Traceback" in (text := log.read_text(errors="replace")):
            live.failures.append(f"a traceback in the server's log: {text[text.index('Traceback') :][:1500]}")
    return live


async def _end(live: Live, server: Server, how: signal.Signals) -> None:
    """Send the signal. SIGTERM has to end the server with status 0, unless it lacked memory."""
    alone = server.ended
    if alone and not server.short:
        live.failures.append(f"the server ended by itself: {server.state}")
    status = await server.end(how)
    if how is signal.SIGTERM and status and not server.short:
        live.failures.append(f"exit status {status} after SIGTERM")
    if alone and server.short:
        live.ended_servers[f"status {status}"] += 1


async def _fault(live: Live, http: httpx.AsyncClient, server: Server, cache: Path, random: Random) -> None:
    """Stop or kill the server, damage the cache perhaps, and start it again, perhaps with a limit."""
    how = random.choice((signal.SIGTERM, signal.SIGKILL))
    live.faults[how.name] += 1
    await _end(live, server, how)
    for _ in range(random.choice((0, 1, 5))):
        if damaged := damage(cache, random):
            live.faults[damaged] += 1
    limited = random.choice((None, "full disk", "disk gets full", "little memory", "memory gets short"))
    if limited is not None:
        live.faults[limited] += 1
    if limited in ("full disk", "disk gets full") and random.random() < 0.7:
        forget_programs(cache)
    if limited == "little memory" and not await _starts_with_little(live, http, server, random):
        limited = None
    if limited != "little memory":
        server.start(Limit.files(random.choice(FILES)) if limited == "full disk" else None)
        await server.ready(http)
    if limited == "disk gets full":
        server.limit(Limit.files(random.choice(FILES)))
    elif limited == "memory gets short":
        server.limit(Limit.memory(server.data + random.choice(SPARE)))


async def _starts_with_little(live: Live, http: httpx.AsyncClient, server: Server, random: Random) -> bool:
    """Start with memory that may not suffice. -> whether the server is healthy; else its log has to say why, unless a
    library below Python has ended the process with a signal."""
    server.start(Limit.memory(random.randint(*LITTLE)))
    try:
        await server.ready(http)
    except RuntimeError:
        live.faults["no start with little memory"] += 1
        if (server.status or 0) >= 0 and not re.search("memory|alloc|failed to map", server.log, re.IGNORECASE):
            live.failures.append(f"a server did not start with little memory, and did not say why: {server.state}")
        return False
    return True


async def _client(
    live: Live, http: httpx.AsyncClient, servers: Sequence[Server], pairs: Sequence[tuple[Asked, Answer]],
    random: Random, stop: asyncio.Event,
) -> None:  # fmt: skip
    """Ask one request after the other, in different ways."""
    while not stop.is_set():
        usable = [server for server in servers if not server.failing]
        if not usable:
            await asyncio.sleep(0.1)
            continue
        server, (asked, answer) = random.choice(usable), random.choice(pairs)
        way = random.choice(("plain", "plain", "stream", "stream", "leaves", "reads slowly", "sends slowly"))
        before, live.requests = server.ends, live.requests + 1
        try:
            text, reason = await asyncio.wait_for(_ask(http, server, asked, way, random), ANSWER)
        except TimeoutError:
            live.failures.append(f"{way}: no answer within {ANSWER:.0f} s")
            continue
        except (httpx.HTTPError, OSError, ValueError, EOFError) as error:
            lost = await server.lost(before)
            live.ended["lost with its server" if lost else "failed"] += 1
            if not lost:
                live.failures.append(f"{way}: {type(error).__name__}: {error}")
            continue
        live.ended[reason] += 1
        right = answer.text.startswith(text) if reason == "left" else (text, reason) == (answer.text, answer.reason)
        if not right and reason != "503":
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


async def _ask(http: httpx.AsyncClient, server: Server, asked: Asked, way: str, random: Random) -> tuple[str, str]:
    """-> the text, and the finish reason or "503". Raises `httpx.HTTPError`, or `EOFError` for a broken stream."""
    url, body = f"{server.url}/v1/completions", _body(asked, way in ("stream", "leaves", "reads slowly"))
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


async def _check_idle(live: Live, http: httpx.AsyncClient, server: Server) -> None:
    """Nothing runs, waits or holds pages any more, and nothing was compiled in a request's way."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "compilations_after_warmup_total")
    deadline, left = time.monotonic() + STOP, {}
    while time.monotonic() < deadline:
        lines = (await http.get(f"{server.url}/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("jaxspec:"))
        left = {n: v for key, v in values.items() for n in names if key.startswith(f"jaxspec:{n}{{") and float(v)}
        if not left:
            return
        await asyncio.sleep(0.2)
    live.failures.append(f"left over: {left}")
