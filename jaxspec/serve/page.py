"""The page at `/`, on which people chat and watch: static files of the package."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxspec.serve.errors import ApiError

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: The page loads nothing from elsewhere, runs no inline scripts, and is not shown inside of other pages.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/` and the files under `/ui/`."""
    contents = {file.name: file.read_bytes() for file in files("jaxspec.serve").joinpath("ui").iterdir()}

    def respond(name: str) -> Response:
        return Response(contents[name], headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])

    async def index(request: Request) -> Response:
        return respond("index.html")

    async def file(request: Request) -> Response:
        if (name := request.path_params["name"]) not in contents:
            raise ApiError(404, f"the page has no file {name!r}", code="unknown_url")
        return respond(name)

    return [Route("/", index), Route("/ui/{name}", file)]
