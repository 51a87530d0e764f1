"""The server process: socket, signal handling and graceful shutdown."""

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
from jaxspec.serve.connections import protocol, room_for

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

#: Seconds to send the remaining bytes of finished responses.
_FLUSH_TIMEOUT = 5
#: Seconds for which an idle connection stays open: longer than clients keep theirs (httpx, and so openai: 5), which
#: otherwise may send a request just when the server closes the connection.
_IDLE_CONNECTION = 20
#: Seconds from the second signal until the process exits, even if a step is still running on the device.
_EXIT_TIMEOUT = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, to detect a used port before loading the model. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """The URL at which a local client reaches `sock`."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, str(host))
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first SIGTERM or SIGINT and stops at once on the second.

    While draining, new requests get 503 and running ones may finish. After the second signal connections are closed
    and `exit_code` is 128 plus the signal number, as in shells.
    """

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
        # Unlike uvicorn's handler, this does not re-raise the signal at the end: a drained server exits with 0.
        self._signals += 1
        if self._signals == 1 and self._loop is not None:
            again = "Ctrl-C again" if sig == signal.SIGINT else "a second signal"
            self._loop.call_soon_threadsafe(self._start_drain, again)
            return
        self.exit_code = 128 + sig
        self.should_exit = self.force_exit = True
        # The engine's thread cannot be interrupted, and a step may take longer than the timeout.
        force_exit = threading.Timer(_EXIT_TIMEOUT, os._exit, [self.exit_code])
        force_exit.daemon = True
        force_exit.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        """Close the connections and stop the engine.

        Handlers then see a disconnected client and return. Cancelled by the end of the loop, each would log a
        traceback.
        """
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        for name in ("uvicorn.error", "asyncio"):  # failures no longer matter: all connections are closed
            logging.getLogger(name).disabled = True
        threading.Thread(target=self._engine.shutdown, daemon=True).start()

    def _start_drain(self, again: str) -> None:
        self._drain = asyncio.create_task(self._drain_engine(again))

    async def _drain_engine(self, again: str) -> None:
        try:
            stats = self._engine.stats()
            if count := stats.running + stats.waiting:
                requests = "1 request" if count == 1 else f"{count} requests"
                print(
                    f"shutting down: waiting up to {self._drain_timeout:g} s for {requests}; {again} stops at once",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            await asyncio.to_thread(self._engine.shutdown, drain=True, timeout=self._drain_timeout)
        finally:
            self.should_exit = True


def serve(
    engine: Engine, sock: socket.socket, options: ServerOptions, drain_timeout: float = 30.0, log_level: str = "info",
    preset: str | None = None,
) -> int:  # fmt: skip
    """Serve a started engine on the bound socket until a signal stops the server. `drain_timeout` in seconds.

    `preset`: the file that its settings come from, to be shown.

    Returns the exit code: 0, or 128 plus the number of the second signal. Raises `OSError` if the port is in use by
    now.
    """
    if (most := room_for(options.max_connections)) < options.max_connections:
        logging.getLogger(__name__).warning(
            "the system's limit of open files allows %d connections, not %d", most, options.max_connections
        )
    config = uvicorn.Config(
        create_app(engine, options),
        log_config=None,
        access_log=log_level == "debug",
        timeout_graceful_shutdown=_FLUSH_TIMEOUT,
        timeout_keep_alive=_IDLE_CONNECTION,
        http=protocol(most),
        ws="none",
        ssl_keyfile=options.tls_key,
        ssl_certfile=options.tls_certificate,
    )
    url = url_of(sock, tls=options.tls_certificate is not None)
    server = Server(config, engine, drain_timeout, _greeting(engine, url, options, preset))
    with contextlib.closing(sock):
        server.run(sockets=[sock])
    return server.exit_code


def _greeting(engine: Engine, url: str, options: ServerOptions, preset: str | None) -> str:
    keys = options.api_keys
    # The variable, so that the key itself is not shown, where it holds one.
    shown = "$JAXSPEC_API_KEY" if [os.environ.get("JAXSPEC_API_KEY")] == list(keys) else "KEY"
    key = f' -H "Authorization: Bearer {shown}"' if keys else ""
    body = f'{{"model": "{engine.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    about = "".join(f"  {subject + ':':<18}{value}\n" for subject, value in engine.summary(preset))
    hint = "Open it in a browser, or try" if options.ui else "Try"
    return (
        f"jaxspec serves {engine.model_name} at {url} (Ctrl-C to stop)\n{about}{hint}:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )
