"""Real servers over HTTP: killed, stopped and started again, with damaged caches, a full disk and little memory, under
clients that misbehave."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import httpx

from jaxspec.bench.chaos.clients import ANSWER, Live, check_idle, client
from jaxspec.bench.chaos.driver import Answer
from jaxspec.bench.chaos.scenario import Asked
from jaxspec.bench.chaos.server import Limit, Server, forget_programs

#: Seconds between two faults.
PAUSE = 12.0
#: Bytes that a file can have on a full disk: no program fits, a profile may.
FILES = (0, 1000, 20_000)
#: Bytes of data with which a server may start or not, and that a server may use more than it does.
LITTLE, SPARE = (150 << 20, 600 << 20), (0, 4 << 20, 16 << 20, 64 << 20)


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
                asyncio.create_task(client(live, http, servers, pairs, Random(random.random()), stop))
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
                    await check_idle(live, http, server)
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
