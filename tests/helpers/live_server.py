"""A server with `FakeEngine`, and requests to it over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from helpers.fakes import FakeEngine
from helpers.patience import PATIENCE
from helpers.serving import serving

CHAT: Any = [{"role": "user", "content": "Hallo"}]


#: Speculation counts of one output of seven tokens: six verifications, which accepted 1, 2, 0, 1, 2, 0.
ONE = {"proposed": 18, "accepted": 6, "accepted_per_position": [4, 2], "mean_accepted_length": 2.0}


FOUR = {"proposed": 72, "accepted": 24, "accepted_per_position": [16, 8], "mean_accepted_length": 2.0}


REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}, ONE),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2}, FOUR),
    ("/v1/chat/completions", {"messages": CHAT}, ONE),
    ("/v1/chat/completions", {"messages": CHAT, "n": 4}, FOUR),
]


@contextmanager
def started(**options: Any) -> Iterator[tuple[FakeEngine, str]]:
    """Start a `FakeEngine` and its server; yields the engine and the base URL."""
    engine = FakeEngine(**options)
    engine.start()
    try:
        with serving(engine) as url:
            yield engine, url
    finally:
        engine.shutdown()


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return httpx.post(url + path, json={"max_tokens": 7, **body}, timeout=PATIENCE).raise_for_status().json()


def stream(url: str, path: str, body: dict[str, Any], usage: bool) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    answer = httpx.post(url + path, json={"max_tokens": 7, **options, **body}, timeout=PATIENCE).raise_for_status()
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def metrics(url: str) -> dict[str, float]:
    """Values of /metrics by name and labels, without the label `model_name` and the prefix `jaxspec:`."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("jaxspec:")]
    named = (line.removeprefix("jaxspec:").rsplit(" ", 1) for line in lines)
    return {re.sub(r'model_name="fake",|,?model_name="fake"(?=})', "", name): float(value) for name, value in named}
