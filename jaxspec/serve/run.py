"""The server process: its socket, its signals, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from jaxspec.serve.app import ServerOptions, create_app

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

#: Seconds that the last bytes of finished answers get to leave.
_FLUSH = 5
#: Seconds after the second signal in which the process has ended, whatever the device is doing.
_AT_ONCE = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet: a port in use shows before the model is loaded. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, str(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: new requests get 503, running ones may end. The second ends it at once:
    connections are closed, and `exit_code` is the shells' for a program that this signal ended, 128 and its number."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_timeout: float, greeting: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._greeting = greeting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._signals = 0
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and not self._signals:
            print(self._greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's own, this does not raise the signal again at the end: a drained server exits with 0.
        self._signals += 1
        if self._signals == 1 and self._loop is not None:
            again = "Ctrl-C again" if sig == signal.SIGINT else "a second signal"
            self._loop.call_soon_threadsafe(self._start_drain, again)
            return
        self.exit_code = 128 + sig
        self.should_exit = self.force_exit = True
        # A step of the engine may take longer than anyone waits, and its thread cannot be interrupted.
        last = threading.Timer(_AT_ONCE, os._exit, [self.exit_code])
        last.daemon = True
        last.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        """Close the connections and stop the engine. Requests see that their client is gone, and end by themselves:
        cancelled by the loop's end, each would leave a traceback."""
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        for name in ("uvicorn.error", "asyncio"):  # no client is left to hear of a failure
            logging.getLogger(name).disabled = True
        threading.Thread(target=self._engine.shutdown, daemon=True).start()

    def _start_drain(self, again: str) -> None:
        self._drain = asyncio.create_task(self._drain_engine(again))

    async def _drain_engine(self, again: str) -> None:
        stats = self._engine.stats()
        if count := stats.running + stats.waiting:
            what = "1 request" if count == 1 else f"{count} requests"
            print(
                f"shutting down: {what} may finish (up to {self._drain_timeout:g} s); {again} ends at once",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        try:
            await asyncio.to_thread(self._engine.shutdown, drain=True, timeout=self._drain_timeout)
        finally:
            self.should_exit = True


def serve(
    engine: Engine, sock: socket.socket, options: ServerOptions, drain_timeout: float = 30.0, log_level: str = "info"
) -> int:
    """Serve a started engine until a signal ends it; -> the exit code: 0, or 128 and the number of a second signal that
    ended it at once. Raises `OSError` if the port was taken meanwhile."""
    config = uvicorn.Config(
        create_app(engine, options),
        log_config=None,
        access_log=log_level == "debug",
        timeout_graceful_shutdown=_FLUSH,
    )
    server = Server(config, engine, drain_timeout, _greeting(engine, url_of(sock), options.api_key is not None))
    with contextlib.closing(sock):
        server.run(sockets=[sock])
    return server.exit_code


def _greeting(engine: Engine, url: str, keyed: bool) -> str:
    key = ' -H "Authorization: Bearer $JAXSPEC_API_KEY"' if keyed else ""
    body = f'{{"model": "{engine.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"jaxspec serves {engine.model_name} at {url} (Ctrl-C ends it). Try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )
