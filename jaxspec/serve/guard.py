"""ASGI middleware: API key check, limits on bodies, request ids."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit
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
            if (tenant := self._tenant_of(scope)) is None:
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, "missing or wrong API key", code="invalid_api_key", headers=headers)
                await render(error)(scope, receive, send)
                return
            scope["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant_of(self, scope: Scope) -> str | None:
        """The digest of the request's key; None if it is not one of them."""
        # Bytes as they came: a key may hold any character, in UTF-8.
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip(b" \t")
        # All are compared, each in constant time, against timing attacks.
        known = [hmac.compare_digest(key, own) for own in self._keys]
        return hashlib.sha256(key).hexdigest()[:16] if any(known) and scheme.lower() == b"bearer" else None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or _PAGE.fullmatch(path) is not None


def hostname(host: str) -> str | None:
    """The name of a Host header, in lower case and without the port; None if it is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


#: Domains that are not in public DNS.
_LOCAL = (".local", ".localhost", ".home.arpa", ".internal", ".lan")


def is_local_name(host: str) -> bool:
    """Whether a Host header is an IP address or a name that no public DNS has: one without a dot, or below a domain for
    local networks."""
    name = hostname(host) or ""
    try:
        ip_address(name)
    except ValueError:
        return "/" not in host and ("." not in host or name.endswith(_LOCAL))
    return True


#: Bytes per second of the slowest body that may take longer than ten times `seconds`.
_SLOWEST = 10_000


class BodyLimit:
    """Rejects request bodies that are too large or too slow.

    413: over `limit` bytes, by Content-Length or while receiving. 408: nothing came for `seconds`, or it is slower
    than 10 kB/s after ten times as long.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "").lstrip("0")
        # Only ASCII digits are a number in HTTP, and Python refuses to read thousands of them.
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > self._limit):
            await render(self._too_large())(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        received, more, end = 0, True, clock() + 10 * self._seconds

        async def limited_receive() -> Message:
            nonlocal received, more
            if not more:  # what comes now is only that the client leaves
                return await receive()
            try:
                message = await asyncio.wait_for(
                    receive(), max(0.0, min(self._seconds, end + received / _SLOWEST - clock()))
                )
            except TimeoutError:
                raise self._too_slow() from None
            received, more = received + len(message.get("body", b"")), message.get("more_body", False)
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    # The rest of the body is never read, so the connection cannot be reused.

    def _too_large(self) -> ApiError:
        message = f"the request body is larger than the limit of {self._limit:,} bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})

    def _too_slow(self) -> ApiError:
        message = f"the request body did not arrive: nothing came for {self._seconds:g} s, or it is too slow"
        return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})
