"""Comments that keep a silent stream alive."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from helpers.fakes import FakeEngine, recited
from helpers.patience import PATIENCE
from helpers.serving import CHAT, error_of, eventually, serving
from jaxspec.serve.app import ServerOptions

COMMENT = ": keep-alive"
OFTEN = ServerOptions(keep_alive=0.01)


def engine(**options: Any) -> FakeEngine:
    engine = FakeEngine(max_num_seqs=1, max_model_len=100_000, **options)
    engine.start()
    return engine


def events(text: str) -> list[Any]:
    """The JSON objects of a stream, which ends with [DONE]."""
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def test_between_tokens() -> None:
    slow = engine(step=0.1)
    try:
        with serving(slow, OFTEN) as url:
            text = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}).text
            first, *rest = [event for event in text.split("\n\n") if event]
            assert first.startswith("data: ") and COMMENT in rest
            assert "".join(event["choices"][0]["text"] for event in events(text)) == recited(3)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:  # skips them
                stream = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=3, stream=True)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == recited(3)
    finally:
        slow.shutdown()


def test_text_that_is_held_back_is_silence() -> None:
    slow = engine(step=0.005)
    try:
        with serving(slow, OFTEN) as url:
            stop = recited(30) + "!"  # every token may begin it
            body = {"prompt": "x", "max_tokens": 25, "stream": True, "stop": stop}
            text = httpx.post(f"{url}/v1/completions", json=body).text
            assert text.startswith(COMMENT)
            assert "".join(event["choices"][0]["text"] for event in events(text)) == recited(25)
    finally:
        slow.shutdown()


def test_off() -> None:
    slow = engine(step=0.1)
    try:
        with serving(slow, ServerOptions(keep_alive=0)) as url:
            text = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}).text
            assert COMMENT not in text and len(events(text)) == 4
    finally:
        slow.shutdown()


@pytest.mark.parametrize("options", [OFTEN, ServerOptions(keep_alive=60)])
def test_before_the_first_output(options: ServerOptions) -> None:
    """A stream in the queue sends headers with its first comment; until then a failure gets its own status."""
    busy = engine(step=0.002)
    try:
        with (
            serving(busy, options) as url,
            httpx.Client(base_url=url, timeout=PATIENCE) as http,
            ThreadPoolExecutor() as pool,
        ):
            running = pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 50_000})
            eventually(lambda: busy.stats().running == 1)
            body = {"prompt": "x", "stream": True}
            if options is OFTEN:
                with http.stream("POST", "/v1/completions", json=body) as waiting:
                    lines = waiting.iter_lines()
                    assert (waiting.status_code, next(lines)) == (200, COMMENT)
                    assert busy.stats().waiting == 1
                    busy.fail()
                    assert "engine_dead" in next(line for line in lines if line.startswith("data: "))
            else:
                waiting = pool.submit(http.post, "/v1/completions", json=body)
                eventually(lambda: busy.stats().waiting == 1)
                busy.fail()
                assert waiting.result().status_code == 503
                assert error_of(waiting.result())["code"] == "engine_dead"
            assert running.result().status_code == 503
    finally:
        busy.shutdown()
