"""ASGI middleware: API key check and limit on the body size."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.errors import ApiError, render

#: Paths that need no key: health probes usually have none.
OPEN_PATHS = frozenset({"/health"})


class BearerAuth:
    """Rejects requests without `Authorization: Bearer KEY` with 401."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._authorized(Headers(scope=scope)):
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, "missing or wrong API key", code="invalid_api_key", headers=headers)
            await render(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Header values are Latin-1. Compared in constant time, against timing attacks.
        return hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key) and scheme.lower() == "bearer"


class BodyLimit:
    """Rejects bodies over `limit` bytes with 413: by Content-Length, or while receiving if there is none."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdigit() and int(content_length) > self._limit:
            await render(self._error())(scope, receive, send)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._error()
            return message

        await self._app(scope, limited_receive, send)

    def _error(self) -> ApiError:
        # The rest of the body is never read, so the connection cannot be reused.
        message = f"the request body is larger than the limit of {self._limit:,} bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
