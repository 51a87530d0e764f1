"""Sends one streamed request to an OpenAI-compatible server and measures it on the client's side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from jaxspec.bench.report import Sample

Route = Literal["chat", "completions"]
PATHS: Mapping[Route, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's route and request fields: `url` without /v1; `fields` are added to every request body."""

    url: str
    model: str
    route: Route = "chat"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": prompt}]} if self.route == "chat" else {"prompt": prompt}
        return {
            "model": self.model,
            **text,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


async def ask(
    http: httpx.AsyncClient, endpoint: Endpoint, prompt: str, max_tokens: int, pieces: list[str] | None = None
) -> Sample:
    """Send one request and measure its stream. Server and network errors are not raised but stored in `Sample.error`.

    `start` is on `time.perf_counter`'s clock. Token counts come from the server's usage, or without one from the
    number of chunks. `itl` holds the gaps between chunks with text; a chunk may have more than one token. `pieces`
    gets the text of every such chunk as it arrives.
    """
    sample = Sample(start=time.perf_counter())
    stamps: list[float] = []
    end = None
    usage: Mapping[str, Any] = {}
    url, body = endpoint.url + PATHS[endpoint.route], endpoint.body(prompt, max_tokens)
    try:
        async with http.stream("POST", url, json=body) as got:
            if got.status_code != 200:
                sample.error = f"HTTP {got.status_code}: {error_message(await got.aread())}"
                return sample
            async for line in got.aiter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                now = time.perf_counter()
                chunk = json.loads(data)
                if chunk.get("error"):
                    sample.error = f"in the stream: {error_message(data.encode())}"
                    return sample
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    if text := _text(choice):
                        stamps.append(now)
                        if pieces is not None:
                            pieces.append(text)
                    if choice.get("finish_reason"):
                        sample.finish_reason, end = choice["finish_reason"], now
    except httpx.TimeoutException:
        sample.error = "timed out"
        return sample
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
        return sample
    except (ValueError, AttributeError, TypeError) as error:
        sample.error = f"the response is not an OpenAI stream: {error}"
        return sample
    if end is None:
        sample.error = "the stream ended without a finish reason"
        return sample

    first = stamps[0] if stamps else end
    sample.ttft, sample.e2e = first - sample.start, end - sample.start
    sample.itl = [later - earlier for earlier, later in pairwise(stamps)]
    sample.input_tokens = usage.get("prompt_tokens") or 0
    sample.output_tokens = usage.get("completion_tokens") or len(stamps)
    if sample.output_tokens > 1:
        sample.tpot = (end - first) / (sample.output_tokens - 1)
    return sample


def error_message(body: bytes) -> str:
    """The message of an OpenAI error object; for other bodies their first 200 characters."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200].strip() or "empty body"


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a chunk: of a completion, or of a chat with its reasoning and the arguments of its tool calls."""
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""  # vLLM's name, and the one of others
    called = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    arguments = "".join(function.get("arguments") or "" for function in called)
    return (choice.get("text") or delta.get("content") or "") + reasoning + arguments
