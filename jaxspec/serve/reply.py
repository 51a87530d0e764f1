"""The HTTP response of a generation: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.outputs import OutputDelta
from jaxspec.serve.answer import Answer, Json
from jaxspec.serve.errors import ApiError
from jaxspec.serve.stream import ClientGone, Generation

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply(Response):
    """Sends the output of `generation`, as a stream if `stream`.

    The headers of a stream are sent with the first output, so that earlier failures get their own HTTP status. If the
    client disconnects or anything fails, unfinished sequences are cancelled.
    """

    def __init__(self, generation: Generation, answer: Answer, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation.attached(receive):
            try:
                first = await self._generation.next()
                if self._stream:
                    await self._events(first, send)
                else:
                    await (await self._whole(first))(scope, receive, send)
            except ClientGone:
                return

    async def _whole(self, batch: list[tuple[int, OutputDelta]]) -> Response:
        while True:
            for index, delta in batch:
                self._answer.gather(index, delta)
            if not self._generation.running:
                return Response(orjson.dumps(self._answer.whole()), media_type="application/json")
            batch = await self._generation.next()

    async def _events(self, batch: list[tuple[int, OutputDelta]], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        try:
            while True:
                chunks = [chunk for index, delta in batch for chunk in self._answer.chunks(index, delta)]
                if not self._generation.running:
                    break
                if chunks:
                    await send({"type": "http.response.body", "body": _sse(chunks), "more_body": True})
                batch = await self._generation.next()
            end = _sse(chunks + self._answer.last_chunks())
        except ApiError as e:
            end = _sse(self._answer.failed(e))
        await send({"type": "http.response.body", "body": end + self._answer.end})


def _sse(events: Iterable[Json]) -> bytes:
    return b"".join(_name(e) + b"data: " + orjson.dumps(e) + b"\n\n" for e in events)


def _name(event: Json) -> bytes:
    """The `event:` line of events that have a type, as those of `/v1/responses`."""
    return f"event: {event['type']}\n".encode() if "type" in event else b""
