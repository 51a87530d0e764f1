"""What stands before the routes: the key, and the limit on the body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.errors import ApiError, render

#: Answered without a key: what watches a server's health seldom holds one.
OPEN_PATHS = frozenset({"/health"})


class BearerAuth:
    """Lets a request through only with `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows(Headers(scope=scope)):
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, "missing or wrong API key", code="invalid_api_key", headers=headers)
            await render(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Header values are Latin-1; in constant time, so that the answer's delay tells nothing.
        return hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key) and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies over `limit` bytes with 413, by their announced length or, unannounced, as they arrive."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._limit:
            await render(self._error())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        # The rest of the body is never read, so the connection can't be used again.
        message = f"the body is larger than the limit of {self._limit:,} bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
