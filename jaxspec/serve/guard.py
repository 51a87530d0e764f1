"""ASGI middleware: API key check, limit on the body size, request ids."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.serve.errors import ApiError, render

#: Paths that need no key, as in vLLM: probes and scrapers usually have none.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
#: The page and its files: it asks for the key.
_PAGE = re.compile(r"/|/ui/[^/]*")
#: Ids of clients that are taken over.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestId:
    """Gives each response the header `X-Request-Id`: the request's own, or else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = id
            await send(message)

        await self._app(scope, receive, named)


class BearerAuth:
    """Rejects requests without `Authorization: Bearer KEY`, for one of the keys, with 401.

    A digest of the key becomes `scope["tenant"]`: what is remembered of a tenant outlives restarts with other keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            if (tenant := self._tenant_of(Headers(scope=scope))) is None:
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, "missing or wrong API key", code="invalid_api_key", headers=headers)
                await render(error)(scope, receive, send)
                return
            scope["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant_of(self, headers: Headers) -> str | None:
        """The digest of the request's key; None if it is not one of them."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Header values are Latin-1. All are compared, in constant time, against timing attacks.
        given = key.strip().encode("latin-1", "replace")
        known = [hmac.compare_digest(given, own) for own in self._keys]
        return hashlib.sha256(given).hexdigest()[:16] if any(known) and scheme.lower() == "bearer" else None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or _PAGE.fullmatch(path) is not None


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
