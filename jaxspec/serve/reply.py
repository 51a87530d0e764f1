"""The HTTP response of a generation: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.serve.answer import Answer, Json
from jaxspec.serve.errors import ApiError
from jaxspec.serve.stream import ClientGone, Generation

#: A comment: clients skip it, and proxies see that the connection is in use.
KEEP_ALIVE = b": keep-alive\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply(Response):
    """Sends the output of `generation`, as a stream if `stream`.

    The headers of a stream are sent with the first output, so that earlier failures get their own HTTP status, or with
    the first comment: a stream with nothing to send for `generation.keep_alive` seconds sends one. If the client
    disconnects or anything fails, unfinished sequences are cancelled.
    """

    def __init__(self, generation: Generation, answer: Answer, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation.attached(receive):
            try:
                if self._stream:
                    await self._events(send)
                else:
                    await (await self._whole())(scope, receive, send)
            except ClientGone:
                return

    async def _whole(self) -> Response:
        while self._generation.running:
            for index, delta in await self._generation.next():
                self._answer.gather(index, delta)
        return Response(orjson.dumps(self._answer.whole()), media_type="application/json")

    async def _events(self, send: Send) -> None:
        clock, pause = asyncio.get_running_loop().time, self._generation.keep_alive
        due = clock() + pause
        batch = await self._generation.next(pause or None)
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        try:
            while True:
                chunks = [chunk for index, delta in batch for chunk in self._answer.chunks(index, delta)]
                if not self._generation.running:
                    break
                body = _sse(chunks)
                # Outputs without a chunk, such as held back text, are silence too.
                if not body and pause and clock() >= due:
                    body = KEEP_ALIVE
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    due = clock() + pause
                batch = await self._generation.next(max(0.0, due - clock()) if pause else None)
            end = _sse(chunks + self._answer.last_chunks())
        except ApiError as e:
            end = _sse(self._answer.failed(e))
        await send({"type": "http.response.body", "body": end + self._answer.end})


def _sse(events: Iterable[Json]) -> bytes:
    return b"".join(_name(e) + b"data: " + orjson.dumps(e) + b"\n\n" for e in events)


def _name(event: Json) -> bytes:
    """The `event:` line of events that have a type, as those of `/v1/responses`."""
    return f"event: {event['type']}\n".encode() if "type" in event else b""
