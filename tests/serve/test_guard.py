"""What the server does about bodies, keys, connections and names that are not as they should be."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn

from helpers.fakes import FakeEngine
from helpers.patience import PATIENCE
from helpers.serving import error_of, eventually, serving
from jaxspec.serve.app import ServerOptions, create_app
from jaxspec.serve.connections import protocol
from jaxspec.serve.errors import ApiError
from jaxspec.serve.guard import BearerAuth, BodyLimit, is_local_name
from jaxspec.serve.run import bind

JSON = (b"content-type", b"application/json")


def call(app: Any, headers: list[tuple[bytes, bytes]], messages: list[dict[str, Any]]) -> tuple[int, bytes]:
    """Status and body of an ASGI application's answer. After `messages`, nothing comes any more."""
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/detokenize", "raw_path": b"/detokenize", "query_string": b"",
        "headers": headers,
        "root_path": "", "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
        "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


@pytest.mark.parametrize(
    ("length", "status"),
    [(b"3", 200), (b"0003", 200), (b"\xb2", 200), (b"1e9", 200), (b"-5", 200), (b"11", 413), (b"9" * 5000, 413)],
)
def test_content_lengths(length: bytes, status: int) -> None:
    body = [{"type": "http.request", "body": b"abc", "more_body": False}]
    assert call(BodyLimit(echo, 10, 60.0), [(b"content-length", length)], body)[0] == status


def test_a_body_that_does_not_end() -> None:
    app = create_app(FakeEngine(), ServerOptions(body_seconds=0.05))  # pyright: ignore[reportArgumentType]
    pieces = [{"type": "http.request", "body": b"[", "more_body": True}]

    async def run(scope: Any, receive: Any, send: Any) -> None:
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    status, body = call(run, [JSON], pieces)
    assert status == 408 and b"request_timeout" in body


def test_a_body_that_trickles() -> None:
    async def forever(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    def trickle() -> list[dict[str, Any]]:
        return [{"type": "http.request", "body": b"", "more_body": True}] * 10**6

    with pytest.raises(ApiError) as error:
        call(BodyLimit(forever, 10, 0.001), [], trickle())
    assert error.value.status_code == 408


@pytest.mark.parametrize("key", ["plain", "voilà", "ключ", "a\xa0", "🔑", "with space"])
def test_keys_are_compared_as_bytes(key: str) -> None:
    body = [{"type": "http.request", "body": b"", "more_body": False}]
    for given, status in ((key, 200), (f" {key} ", 200), (key[:-1], 401), (key + "x", 401), ("", 401)):
        app = BearerAuth(echo, ["other", key])
        assert call(app, [(b"authorization", b"Bearer " + given.encode())], list(body))[0] == status
    assert call(BearerAuth(echo, [key]), [(b"authorization", b"\xff\xfe")], list(body))[0] == 401


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1:8000", True), ("[::1]:8000", True), ("10.0.0.5", True), ("localhost:8000", True), ("gpu-box", True),
     ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("", True), ("[", True)],
)  # fmt: skip
def test_names_that_only_this_network_knows(host: str, local: bool) -> None:
    assert is_local_name(host) is local


def test_the_live_view_is_not_for_pages_whose_name_was_made_to_lead_here() -> None:
    engine = FakeEngine()
    engine.start()
    try:
        options = ServerOptions(allowed_origins=("https://llm.example",))
        with serving(engine, options) as url:
            refused = httpx.get(f"{url}/live", headers={"Host": "evil.example"})
            assert refused.status_code == 403 and error_of(refused)["code"] == "foreign_host"
            unknown_key = {"Host": "evil.example", "Authorization": "Bearer x"}
            assert httpx.get(f"{url}/live", headers=unknown_key).status_code == 403
            for headers in ({"Host": "llm.example"}, {"Host": "LLM.example:8443"}, {"Host": "box.local"}, {}):
                with httpx.stream("GET", f"{url}/live", headers=headers, timeout=PATIENCE) as allowed:
                    assert allowed.status_code == 200
    finally:
        engine.shutdown()


@contextmanager
def bounded(most: int, seconds: float, app: Any = echo) -> Iterator[tuple[str, int]]:
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http=protocol(most, seconds), log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield sock.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"


@pytest.mark.parametrize("before", [b"", b"POST / HTTP/1.1\r\nHos", REQUEST + b"POST /"])
def test_connections_without_a_whole_header_are_closed(before: bytes) -> None:
    with bounded(8, 0.1) as address, socket.create_connection(address, PATIENCE) as silent:
        silent.sendall(before)
        while silent.recv(1000):
            pass  # the answer to a whole request; then the end


def test_a_slow_answer_is_no_reason_to_close() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.5)
        await echo(scope, receive, send)

    with bounded(8, 0.05, slow) as (host, port):
        assert httpx.post(f"http://{host}:{port}/", content=b"abc", timeout=PATIENCE).text == "3"


@pytest.mark.parametrize("whole", [True, False])
def test_a_client_that_reads_nothing_is_closed(whole: bool) -> None:
    """One answer of 64 MB that is sent at once, or a stream that has to wait for the client."""
    ended: list[bool] = []

    async def much(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        try:
            for i in range(1 if whole else 1000):
                piece = bytes(64_000_000 if whole else 100_000)
                await send({"type": "http.response.body", "body": piece, "more_body": not whole and i < 999})
        finally:
            ended.append(True)

    with bounded(1, 0.05, much) as address, socket.create_connection(address, PATIENCE) as silent:
        silent.sendall(REQUEST)
        eventually(lambda: bool(ended))

        def free() -> bool:  # there is room for one connection
            with socket.create_connection(address, PATIENCE) as other, suppress(ConnectionResetError):
                other.sendall(REQUEST)
                return other.recv(20).startswith(b"HTTP/1.1 200")
            return False

        eventually(free)


def test_connections_are_counted() -> None:
    with bounded(2, PATIENCE) as address:
        held = [socket.create_connection(address, PATIENCE) for _ in range(2)]
        time.sleep(0.2)  # the server takes them in any order
        with socket.create_connection(address, PATIENCE) as third, suppress(ConnectionResetError):
            assert third.recv(1) == b""
        held[0].close()
        held[1].sendall(REQUEST)
        assert held[1].recv(100).startswith(b"HTTP/1.1 200")
        held[1].close()
