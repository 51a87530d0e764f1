"""Real servers over HTTP: killed, stopped and started again, with damaged caches, under clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from jaxspec.bench.chaos.driver import Answer
from jaxspec.bench.chaos.scenario import CONTEXT, PAGE, Asked
from jaxspec.bench.peers.server import free_port

#: Seconds for a start, for the end after SIGTERM, and for one answer.
START, STOP, ANSWER = 240.0, 60.0, 120.0
#: Seconds between two faults.
PAUSE = 12.0
SETTINGS = {
    "max_num_seqs": 8, "max_model_len": CONTEXT, "page_size": PAGE, "kv_cache_tokens": 12 * PAGE, "predictor": "none",
    "draft": "[suffix,truncated:1]", "max_num_batched_tokens": 24, "token_buckets": "[1,8]", "order": "las",
}  # fmt: skip


class Server:
    """One server process on a port of its own; all share a cache folder."""

    def __init__(self, model: Path, cache: Path, log: Path) -> None:
        self._model, self._cache, self._log_path = model, cache, log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether requests may fail: it is being stopped, or is down.
        self.failing = True
        #: How often it was killed or stopped, so that an answer knows whether that happened meanwhile.
        self.ends = 0

    def start(self) -> None:
        settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
        environment = {**os.environ, "JAXSPEC_CACHE": str(self._cache), "JAX_PLATFORMS": "cpu", "JAXSPEC_THREADS": "1"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-m", "jaxspec.serve", "--model", str(self._model), "--port", str(self.port)]
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--served-model-name", "tiny", *settings], env=environment, stdout=log, stderr=log
            )

    async def ready(self, http: httpx.AsyncClient) -> None:
        """Wait until it is healthy. Raises `TimeoutError`, or `RuntimeError` if it has ended."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError("a server did not start")
            with suppress(httpx.HTTPError):
                if (await http.get(f"{self.url}/health")).status_code == 200:
                    self.failing = False
                    return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"the server was not healthy after {START:.0f} s")

    async def end(self, how: signal.Signals) -> int:
        """Send the signal. -> the exit status. Raises `TimeoutError`."""
        assert self._process is not None
        self.failing, self.ends = True, self.ends + 1
        self._process.send_signal(how)
        deadline = time.monotonic() + STOP
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not end within {STOP:.0f} s after {how.name}")
            await asyncio.sleep(0.05)
        return self._process.returncode

    @property
    def state(self) -> str:
        """Whether it runs, or its exit status, with the end of its log."""
        status = self._process and self._process.poll()
        end = self._log_path.read_text(errors="replace")[-1500:]
        return "runs" if status is None else f"has ended with {status}: {end}"

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@dataclass
class Live:
    """What happened. failures: what was wrong, in words."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


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
    servers = [Server(model, cache, folder / f"server{i}.log") for i in range(2)]
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
                await _check_idle(live, http, server)
                if status := await server.end(signal.SIGTERM):
                    live.failures.append(f"exit status {status} after SIGTERM")
        except (TimeoutError, RuntimeError, httpx.HTTPError) as error:
            states = [f"server {i} {server.state}" for i, server in enumerate(servers)]
            live.failures.append(f"{type(error).__name__}: {error}; {', '.join(states)}")
        finally:
            for task in asking:
                task.cancel()
            for server in servers:
                server.kill()
    for i in range(len(servers)):
        if "Traceback" in (text := (folder / f"server{i}.log").read_text(errors="replace")):
            live.failures.append(f"a traceback in the server's log: {text[text.index('Traceback') :][:1500]}")
    return live


async def _fault(live: Live, http: httpx.AsyncClient, server: Server, cache: Path, random: Random) -> None:
    """Stop or kill the server, damage the cache perhaps, and start it again."""
    how = random.choice((signal.SIGTERM, signal.SIGKILL))
    live.faults[how.name] += 1
    status = await server.end(how)
    if how is signal.SIGTERM and status:
        live.failures.append(f"exit status {status} after SIGTERM")
    for _ in range(random.choice((0, 1, 5))):
        if damaged := damage(cache, random):
            live.faults[damaged] += 1
    server.start()
    await server.ready(http)


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
            lost = server.ends != before or server.failing
            live.ended["lost with its server" if lost else "failed"] += 1
            if not lost:
                live.failures.append(f"{way}: {type(error).__name__}: {error}")
            continue
        live.ended["left" if way == "leaves" else reason] += 1
        right = answer.text.startswith(text) if way == "leaves" else (text, reason) == (answer.text, answer.reason)
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
