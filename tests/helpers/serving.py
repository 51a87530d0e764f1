"""The server in a thread, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from helpers.patience import PATIENCE
from jaxspec.serve.app import ServerOptions, create_app
from jaxspec.serve.run import bind, url_of

#: `Any`: the OpenAI client wants its own TypedDicts.
CHAT: Any = [{"role": "user", "content": "Hallo"}]
COMPLETION = {"prompt": "x"}


@contextmanager
def serving(engine: Any, options: ServerOptions | None = None) -> Iterator[str]:
    """Serve `engine`; yields the base URL."""
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, options), log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def eventually(holds: Callable[[], bool], timeout: float = PATIENCE) -> None:
    """Wait until `holds()` is true. Fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a response, checked to have OpenAI's fields."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
