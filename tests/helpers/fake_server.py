"""An OpenAI-compatible server that streams tokens at a fixed rate."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from helpers.patience import PATIENCE

TOKENS = 6


GAP_S = 0.01


class FakeServer:
    """Streams `TOKENS` chunks, `GAP_S` seconds apart. A prompt that contains a word of `faults` triggers that fault."""

    faults = ("refuse", "break", "garble")

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.registry = registry = CollectorRegistry()
        self.drafts = Counter("jaxspec:spec_decode_num_drafts", "", registry=registry)
        self.drafted = Counter("jaxspec:spec_decode_num_draft_tokens", "", registry=registry)
        self.accepted = Counter("jaxspec:spec_decode_num_accepted_tokens", "", registry=registry)
        self.queued = Histogram("jaxspec:request_queue_time_seconds", "", registry=registry)
        per_level = Counter("jaxspec:spec_decode_num_accepted_tokens_per_pos", "", ["position"], registry=registry)
        self.accepted_first = per_level.labels("0")
        for prefix in ("jaxspec", "vllm"):  # jaxspec's servers have both
            Gauge(f"{prefix}:kv_cache_usage_perc", "", ["model_name"], registry=registry).labels("fake").set(0.25)
        self.app = Starlette(
            routes=[
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "fake"}]})),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.count()
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        fault = next((f for f in self.faults if f in prompt), None)
        if fault == "refuse":
            return JSONResponse({"error": {"message": "the queue is full", "code": "queue_full"}}, status_code=429)

        async def chunks():
            if chat:
                yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            for i in range(TOKENS):
                await asyncio.sleep(GAP_S)
                text = {"delta": {"content": f"t{i}"}} if chat else {"text": f"t{i}"}
                yield {"choices": [{"index": 0, "finish_reason": "length" if i == TOKENS - 1 else None, **text}]}
            yield {"choices": [], "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": TOKENS}}

        async def stream():
            if fault == "garble":
                yield "data: no json\n\n"
            async for chunk in chunks():
                if fault == "break" and chunk.get("usage") is None and chunk["choices"][0].get("finish_reason"):
                    return
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def count(self) -> None:
        """Count ten verifications per request, each of four draft tokens with one accepted."""
        self.drafts.inc(10)
        self.drafted.inc(40)
        self.accepted.inc(10)
        self.accepted_first.inc(10)
        self.queued.observe(0.5)

    def metrics(self, _: Request) -> Response:
        return PlainTextResponse(generate_latest(self.registry))


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """The base URL of `app`, served from a thread on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
