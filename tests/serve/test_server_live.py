"""The command itself with the real model, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from helpers.patience import PATIENCE
from helpers.serving import eventually

pytestmark = pytest.mark.slow

CHAT: list = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
#: Few step sizes: this is about the server, and each costs seconds of compiling where nothing is cached yet.
SETTINGS = ("max_num_batched_tokens=64", "token_buckets=[1,16,64]", "max_model_len=1024", "kv_cache_tokens=16384")


@contextmanager
def started(stderr: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yields its process and its base URL. The process is killed at the end if it still runs."""
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "jaxspec.serve", "--port", "0", *sets]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            url = re.search(r"http://\S+", greeting)
            assert url, f"the server did not start: {greeting!r}"
            yield process, url[0]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with started() as (process, url):
        yield url
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def metrics(url: str) -> dict[str, float]:
    """Values by name without the prefix, labels left out."""
    lines = re.findall(r"^jaxspec:(\w+)\{[^}]*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list()
    return model.id


def test_completion_is_the_same_streamed(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**ask)
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_is_the_same_streamed(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": CHAT, "max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    message, logprobs = whole.choices[0].message, whole.choices[0].logprobs
    assert message.content
    assert whole.usage is not None
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == whole.usage.completion_tokens
    # Greedy: each token is its position's likeliest.
    assert all(entry.token == entry.top_logprobs[0].token for entry in logprobs.content)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_seed_and_n(client: openai.OpenAI, model: str) -> None:
    # Unfiltered on purpose: rounding in the tail of 49,152 tokens must not change a sample either.
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 40}
    several = client.completions.create(**ask, n=3, seed=5)
    singly = [client.completions.create(**ask, seed=5 + i).choices[0].text for i in range(3)]
    assert [c.text for c in several.choices] == singly
    assert len(set(singly)) > 1


def test_stop_string(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text
    stop = free[10:14]
    answer = client.completions.create(**ask, stop=stop).choices[0]
    assert answer.text == free[: free.index(stop)]
    assert answer.finish_reason == "stop"


def test_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x " * 2000}, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "x", "extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ]
    for bad, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=model, **bad)
        assert caught.value.param == param
    assert client.completions.create(model=model, prompt="x", max_tokens=1).choices  # and it goes on serving


def test_tokenize_and_back(url: str) -> None:
    text = "Grüße, 世界 🦉 <|im_end|>"
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_many_streams_some_cut(url: str, model: str) -> None:
    """64 at once, every fifth leaves half-way: the others get all of theirs, and nothing is left behind."""
    length = 48

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[int, str | None]:
        stream = await client.completions.create(
            model=model, prompt=f"Story number {i}:", max_tokens=length, seed=i, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks, tokens, reason = 0, 0, None
        async for chunk in stream:
            chunks += 1
            if i % 5 == 0 and chunks >= length // 2:
                await stream.close()
                break
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            reason = (chunk.choices[0].finish_reason if chunk.choices else None) or reason
        return tokens, reason

    async def crowd() -> list[tuple[int, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    results = asyncio.run(crowd())
    assert [r for i, r in enumerate(results) if i % 5] == [(length, "length")] * 51
    eventually(lambda: metrics(url)["num_requests_running"] == 0)
    after = metrics(url)
    assert after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    assert after["compilations_after_warmup_total"] == 0
    assert after["time_to_first_token_seconds_count"] >= 64


def test_sigterm_drains() -> None:
    with started() as (process, url):
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            body = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                events = stream.iter_lines()
                next(events)
                process.send_signal(signal.SIGTERM)
                eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
                refused = httpx.post(f"{url}/v1/completions", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                rest = [e for e in events if e]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(timeout=PATIENCE) == 0


def test_a_second_ctrl_c_ends_running_streams_without_noise() -> None:
    with started(stderr=subprocess.PIPE) as (process, url):
        body = {"prompt": "The", "max_tokens": 900, "ignore_eos": True, "stream": True}

        def cut() -> bool:
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
                    return not any(line == "data: [DONE]" for line in stream.iter_lines())
            except httpx.TransportError:
                return True

        with ThreadPoolExecutor(6) as pool:
            streams = [pool.submit(cut) for _ in range(6)]
            eventually(lambda: metrics(url)["num_requests_running"] == 6)
            process.send_signal(signal.SIGINT)
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=PATIENCE)[1]
            assert all(stream.result() for stream in streams)
        assert process.returncode == 130
        assert "Traceback" not in said and "ERROR" not in said
        assert "waiting up to 30 s for 6 requests; Ctrl-C again stops at once" in said


class Capital(BaseModel):
    country: str = Field(max_length=40)
    capital: str = Field(max_length=40)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def test_parse_returns_an_object(client: openai.OpenAI, model: str) -> None:
    got = client.chat.completions.parse(
        model=model, messages=CHAT, response_format=Capital, max_tokens=100, temperature=0
    )
    parsed = got.choices[0].message.parsed
    assert parsed is not None
    assert parsed.capital == "Paris"


def test_a_tool_loop_of_three_turns(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]
    for choice in choices:
        got = client.chat.completions.create(
            model=model, messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=100, temperature=0,
            parallel_tool_calls=False,
        )  # fmt: skip
        message = got.choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."})
    last = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    assert last.choices[0].message.content


def test_responses_are_the_chats_answers(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input=CHAT[0]["content"], max_output_tokens=40, temperature=0)
    chat = client.chat.completions.create(model=model, messages=CHAT, max_tokens=40, temperature=0)
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(model=model, input=CHAT[0]["content"], max_output_tokens=40, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == whole.output_text
