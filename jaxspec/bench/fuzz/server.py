"""The server under test: the real application and engine with a tiny model, in this process or behind a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.types import Message

from jaxspec.bench.fuzz.bodies import Body
from jaxspec.bench.fuzz.checkpoint import write_folder
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.serve.app import ServerOptions, create_app
from jaxspec.serve.run import bind, url_of

#: Bytes of a body that the server takes.
MAX_BODY = 200_000


@dataclass
class Answer:
    """status 0: none came. cut: whether the connection was closed before the answer's end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: bool = False


def engine(folder: Path, settings: Sequence[str] = ()) -> Engine:
    """An engine with a tiny model whose pool is small enough for preemption. Not started. settings: `KEY=VALUE`."""
    from jaxspec.config import parse_overrides

    chosen = {
        "model": str(write_folder(folder)), "max_num_seqs": 16, "max_model_len": 160, "page_size": 16,
        "kv_cache_tokens": 1024, "predictor": "none", "draft": ["grammar", "suffix"], "compile_in_background": False,
        "served_model_name": ["tiny"],
    }  # fmt: skip
    return Engine(EngineConfig.load(None, **chosen, **parse_overrides(settings)))


def application(engine: Engine) -> FastAPI:
    return create_app(engine, ServerOptions(max_body=MAX_BODY))


class InProcess:
    """Calls the application as a web server would."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def send(self, body: Body) -> Answer:
        length = len(body.data) if body.declared is None else body.declared
        # A web server passes on what it has read, which is never more than was declared.
        whole = b"".join(body.chunks)[: max(0, length)]
        headers = [(b"host", b"127.0.0.1"), *body.headers]
        if all(name != b"content-length" for name, _ in headers):
            headers.append((b"content-length", str(max(0, length)).encode()))
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": body.route, "raw_path": body.route.encode(), "query_string": b"", "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        short = len(whole) < length  # the client hangs up before the body's end
        pieces = [whole] if len(body.chunks) == 1 else list(body.chunks) if whole == body.data else [whole]
        waiting = [{"type": "http.request", "body": p, "more_body": short or i + 1 < len(pieces)}
                   for i, p in enumerate(pieces)]  # fmt: skip
        answer, done = Answer(), asyncio.Event()

        async def receive() -> Message:
            if waiting:
                return waiting.pop(0)
            if not (short or body.leaves):
                await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message["headers"]}
            else:
                answer.body += message.get("body", b"")
                if not message.get("more_body"):
                    done.set()

        with suppress(Exception):  # the application answers a bug with 500 and raises it again, for the log
            await self._app(scope, receive, send)
        answer.cut = short or body.leaves
        return answer

    @classmethod
    @asynccontextmanager
    async def running(cls, app: FastAPI) -> AsyncIterator[InProcess]:
        async with app.router.lifespan_context(app):
            yield cls(app)


class OverSocket:
    """Sends bytes to a server on a free port, in its own thread and event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def send(self, body: Body) -> Answer:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            return await self._exchange(reader, writer, body)
        except OSError:  # the server closed it, or the client did
            return Answer(cut=True)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Body) -> Answer:
        length = len(body.data) if body.declared is None else body.declared
        headers = [(b"connection", b"close"), *body.headers]
        for name, value in ((b"host", b"127.0.0.1"), (b"content-length", str(length).encode())):
            if all(given != name for given, _ in headers):
                headers.append((name, value))
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        writer.write(b"POST " + body.route.encode() + b" HTTP/1.1\r\n" + head + b"\r\n")
        for chunk in body.chunks:
            writer.write(chunk)
            with suppress(OSError):  # it may have been refused; the answer is read below
                await writer.drain()
            await asyncio.sleep(body.pause)
        short = length > len(body.data)
        if (short or body.leaves) and writer.can_write_eof():
            writer.write_eof()
        raw = await reader.read()
        if raw.startswith(b"HTTP/1.1 100 "):  # to a client that asked whether to go on
            raw = raw.partition(b"\r\n\r\n")[2]
        head_bytes, _, content = raw.partition(b"\r\n\r\n")
        lines = head_bytes.decode("latin-1").split("\r\n")
        found = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        status = int(lines[0].split()[1]) if lines[0].startswith("HTTP/") else 0
        if found.get("transfer-encoding") == "chunked":
            content = _unchunked(content)
        return Answer(status, found, content, cut=short or body.leaves)

    @classmethod
    @asynccontextmanager
    async def running(cls, app: FastAPI) -> AsyncIterator[OverSocket]:
        from jaxspec.serve.connections import protocol  # what the command serves with

        sock = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, http=protocol(), timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            await asyncio.sleep(0.01)
        url = urlsplit(url_of(sock))
        try:
            yield cls(str(url.hostname), int(url.port or 0))
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join)
            sock.close()


def _unchunked(content: bytes) -> bytes:
    found = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        count = int(size or b"0", 16)
        found, content = found + content[:count], content[count + 2 :]
        if not count:
            break
    return found
