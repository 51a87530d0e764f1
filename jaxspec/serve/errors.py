"""Errors as OpenAI error objects with the matching HTTP status."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.errors import InvalidRequest

logger = logging.getLogger("jaxspec.serve")

#: Most characters of a message and of a field's name: the values and names in them are the client's.
MAX_MESSAGE, MAX_PARAM = 1000, 200

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """An error response: `param` names the offending field, `code` is OpenAI's error code.

    Subclasses Starlette's `HTTPException`, which the framework handles wherever it is raised, pydantic validators
    included.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = error_body(status, message, param, code)


@contextmanager
def bad_request() -> Iterator[None]:
    """Raises `ApiError` (400) instead of `InvalidRequest`."""
    try:
        yield
    except InvalidRequest as e:
        raise invalid(e) from e


def invalid(e: InvalidRequest) -> ApiError:
    """The response (400) to a request that cannot be served."""
    return ApiError(400, str(e), param=e.field, code="invalid_value")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    told, field = (_cut(text, most) for text, most in ((message, MAX_MESSAGE), (param or "", MAX_PARAM)))
    return {"error": {"message": told, "type": kind, "param": field or None, "code": code}}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def install_handlers(app: FastAPI) -> None:
    """Make `app` return every error as an error object: framework errors, validation errors and bugs."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, e: HTTPException) -> Response:
        return render(e if isinstance(e, ApiError) else _from_framework(request, e))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, e: RequestValidationError) -> Response:
        return render(_from_validation(request, e.errors()))

    @app.exception_handler(Exception)
    async def _bug(request: Request, e: Exception) -> Response:
        # The framework re-raises the error, so the traceback goes to the log and never to the client.
        return render(ApiError(500, "internal server error", code="internal_error"))


def render(e: ApiError) -> Response:
    return Response(orjson.dumps(e.body), e.status_code, e.headers, media_type="application/json")


def _from_framework(request: Request, e: HTTPException) -> ApiError:
    message, code = str(e.detail), None
    if e.status_code == 404:
        message, code = f"unknown route: {request.method} {request.url.path}", "unknown_url"
    elif e.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
    return ApiError(e.status_code, message or HTTPStatus(e.status_code).phrase, code=code, headers=e.headers)


def _from_validation(request: Request, errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors; an OpenAI error object describes one error."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["loc"] == ("body",):
        kind = request.headers.get("content-type", "")
        hint = "" if "json" in kind else ", sent with the header Content-Type: application/json"
        return ApiError(400, f"the request body must be a JSON object{hint}", code="invalid_body")
    return invalid_field(first, first["loc"][1:])


def invalid_field(first: Mapping[str, Any], loc: Sequence[str | int]) -> ApiError:
    """One of pydantic's errors as a response; `loc`: of the field in the body."""
    param = field_of(loc)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return ApiError(400, f"missing required field: {param}", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def field_of(loc: Sequence[str | int]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or "body"
