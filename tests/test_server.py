"""The server against an engine that recites: requests, answers, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from fakes import RECITED, FakeEngine
from jaxspec.sched.slo import Slo
from jaxspec.serve.app import ServerOptions
from serving import eventually, serving

CHAT = [{"role": "user", "content": "Hallo"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine, ServerOptions(max_body=100_000)) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def recited(tokens: int, start: int = 0) -> str:
    text = RECITED.encode() * (start + tokens)
    return text[start : start + tokens].decode("utf-8", "replace")


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


# -- completions -------------------------------------------------------------------------------------------------------


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == recited(16)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 16, 19)


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]])
def test_kinds_of_prompt(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=5, n=2, seed=3, echo=True)
    prompts = ["ab", "c"] if isinstance(prompt[0], list) or "c" in prompt else ["ab"]
    expected = [p + recited(5, 3 + i) for p in prompts for i in range(2)]
    assert [c.text for c in answer.choices] == expected
    assert [c.index for c in answer.choices] == list(range(len(expected)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake", prompt=["x", "y"], max_tokens=60, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, ends = [""] * 4, {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == [recited(60)] * 4
    assert ends == dict.fromkeys(range(4), "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 240)
    assert len({c.id for c in chunks}) == 1


def test_a_stream_never_cuts_a_character(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": len(RECITED.encode()) * 2, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == RECITED * 2
    assert not any("\ufffd" in t for t in texts)
    assert "ü" in texts


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: openai.OpenAI, stream: bool) -> None:
    for include, end in ((False, ""), (True, "sagt:")):
        answer = client.completions.create(
            model="fake", prompt="x", stop=["sagt:", "nie"], max_tokens=200, stream=stream,
            extra_body={"include_stop_str_in_output": include},
        )  # fmt: skip
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        assert "".join(c.text for c in choices) == "Die Eule " + end
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == "sagt:"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_and_echo(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(
        model="fake", prompt="abc", max_tokens=18, logprobs=2, echo=True, stream=stream, seed=0
    )
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    parts = [c.logprobs for c in choices if c.logprobs]
    tokens = [t for p in parts for t in p.tokens]
    assert tokens[:7] == ["a", "b", "c", "D", "i", "e", " "]
    assert tokens[-2:] == ["bytes:\\xc3", "bytes:\\xbc"]
    assert [lp for p in parts for lp in p.token_logprobs] == [None] + [-0.5] * 20
    tops = [t for p in parts for t in p.top_logprobs]
    assert tops[:2] == [None, {"b": -0.5, "x": -1.5}]
    assert [o for p in parts for o in p.text_offset][:7] == list(range(7))
    assert "".join(c.text for c in choices) == "abc" + recited(18)


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=0, logprobs=0, echo=True)
    (choice,) = answer.choices
    assert choice.text == "abc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake", messages=CHAT, max_completion_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == recited(8)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("[user]Hallo\n[assistant]")


def test_chat_fills_the_context_by_default(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    assert answer.usage is not None
    assert answer.usage.total_tokens == engine.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=CHAT, max_tokens=30, stream=True, n=2, stream_options={"include_usage": True}
        )
    )
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == recited(30)
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
        assert mine[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=17, logprobs=True, top_logprobs=3, stream=stream
    )
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    content = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert len(content) == 17
    assert (content[0].token, content[0].logprob, content[0].bytes) == ("D", -0.5, [ord("D")])
    assert [t.token for t in content[0].top_logprobs] == ["D", "x", "y"]
    assert content[0].top_logprobs[2].logprob == -9999
    assert content[16].bytes == [0xC3]


def test_text_parts_and_the_developer(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Ha"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "developer", "content": "Kurz."}, {"role": "user", "content": parts}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens).decode() == "[system]Kurz.\n[user]Ha\nllo\n[assistant]"


def test_fields_reach_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    body = {
        "model": "fake", "prompt": "x", "max_tokens": 1, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"65": -100},
        "seed": 11, "stop": "zzz", "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False,
        "priority": -2, "slo": {"ttft_ms": 100, "tpot_ms": 20.5}, "user": "me", "n": None, "best_of": 1,
        "suffix": None, "response_format": {"type": "text"}, "tools": [], "no such field": {"a": 1},
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200
    params = engine.submitted[-1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.25)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert params.logit_bias == {65: -100}
    assert (params.seed, list(params.stop), list(params.stop_token_ids)) == (11, ["zzz"], [3])
    assert params.ignore_eos
    assert not params.skip_special_tokens
    assert engine.targets[-1] == Slo(tpot=0.0205, ttft=0.1)


# -- other routes ------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "jaxspec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "aé"}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == ([97, 0xC3, 0xA9], 3, 512)
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}


def test_health_and_schema(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]


def metric(text: str, name: str, labels: str = 'model_name="fake"') -> float:
    (line,) = (row for row in text.splitlines() if row.startswith(f"jaxspec:{name}{{{labels}}}"))
    return float(line.split()[-1])


def test_metrics(http: httpx.Client) -> None:
    before = http.get("/metrics").text
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
    after = http.get("/metrics").text

    def grown(name: str, labels: str = 'model_name="fake"') -> float:
        return metric(after, name, labels) - metric(before, name, labels)

    assert grown("generation_tokens_total") == 9
    assert grown("inter_token_latency_seconds_count") == 8
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("request_queue_time_seconds_count") == 1
    assert grown("request_success_total", 'finished_reason="length",model_name="fake"') == 1
    assert metric(after, "num_requests_running") == metric(after, "num_requests_waiting") == 0
    assert metric(after, "host_overhead_ratio") == 0.25
    for name in (
        "kv_cache_usage_perc", "kv_positions_padded_ratio", "step_tokens_padded_ratio", "num_preemptions_total",
        "num_switches_total", "recomputed_tokens_total", "recompute_seconds_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
        "compilations_after_warmup_total",
    ):  # fmt: skip
        assert metric(after, name) == 0


# -- bad requests ------------------------------------------------------------------------------------------------------

COMPLETION = {"prompt": "x"}
BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": ["x"] * 1000}, "prompt"),
    (COMPLETION | {"n": 0}, "n"),
    (COMPLETION | {"n": 129}, "n"),
    ({"prompt": ["x", "y"], "n": 100}, "n"),
    (COMPLETION | {"best_of": 2}, "best_of"),
    (COMPLETION | {"max_tokens": 0}, "max_tokens"),
    (COMPLETION | {"max_tokens": -1}, "max_tokens"),
    (COMPLETION | {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETION | {"max_tokens": "5"}, "max_tokens"),
    (COMPLETION | {"max_tokens": 10**30}, "max_tokens"),
    (COMPLETION | {"temperature": -0.1}, "temperature"),
    (COMPLETION | {"temperature": "hot"}, "temperature"),
    (COMPLETION | {"temperature": True}, "temperature"),
    (COMPLETION | {"top_p": 0}, "top_p"),
    (COMPLETION | {"top_p": 1.1}, "top_p"),
    (COMPLETION | {"top_k": -2}, "top_k"),
    (COMPLETION | {"min_p": 2}, "min_p"),
    (COMPLETION | {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETION | {"frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETION | {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETION | {"seed": "x"}, "seed"),
    (COMPLETION | {"stop": ""}, "stop"),
    (COMPLETION | {"stop": [""]}, "stop"),
    (COMPLETION | {"stop": [1]}, "stop"),
    (COMPLETION | {"stop": ["x"] * 17}, "stop"),
    (COMPLETION | {"stop": "x" * 1001}, "stop"),
    (COMPLETION | {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    (COMPLETION | {"logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETION | {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETION | {"logit_bias": {"1000": 1}}, "logit_bias"),
    (COMPLETION | {"logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETION | {"logprobs": 21}, "logprobs"),
    (COMPLETION | {"logprobs": True}, "logprobs"),
    (COMPLETION | {"suffix": "y"}, "suffix"),
    (COMPLETION | {"stream": "yes"}, "stream"),
    (COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETION | {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (COMPLETION | {"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
    (COMPLETION | {"slo": {"tpot_ms": "fast"}}, "slo.tpot_ms"),
    (COMPLETION | {"slo": {"tpot_ms": -1}}, "slo.tpot_ms"),
    (COMPLETION | {"slo": {"tpot_ms": True}}, "slo.tpot_ms"),
    (COMPLETION | {"slo": {"tpot_ms": 1e-300}}, "slo.tpot_ms"),
    (COMPLETION | {"slo": {"tpot": 20}}, "slo.tpot"),
    (COMPLETION | {"slo": {"category": 3}}, "slo.category"),
    (COMPLETION | {"slo": {"category": "chat"}}, "slo.category"),
    (COMPLETION | {"slo": 5}, "slo"),
    (COMPLETION | {"slo": [{}]}, "slo"),
    (COMPLETION | {"priority": 1.5}, "priority"),
    (COMPLETION | {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETION | {"tools": [{"type": "function"}]}, "tools"),
    (COMPLETION | {"model": 7}, "model"),
]
MESSAGES = {"messages": CHAT}
BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    (MESSAGES | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (MESSAGES | {"max_completion_tokens": 1000}, "max_completion_tokens"),
    (MESSAGES | {"max_tokens": 1000}, "max_tokens"),
    (MESSAGES | {"top_logprobs": 2}, "top_logprobs"),
    (MESSAGES | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (MESSAGES | {"logprobs": 3}, "logprobs"),
    (MESSAGES | {"tool_choice": "required"}, "tool_choice"),
    (MESSAGES | {"slo": {"tpot_ms": "20"}}, "slo.tpot_ms"),
    (MESSAGES | {"slo": {"category": "chat"}}, "slo.category"),
]
BAD = [("/v1/completions", *b) for b in BAD_COMPLETIONS] + [("/v1/chat/completions", *b) for b in BAD_CHATS]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{b[2]}-{i}" for i, b in enumerate(BAD)])
def test_bad_fields_are_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "x", "temperature": NaN}', b"[" * 50_000,
     b'{"prompt": "x", "top_p": Infinity}', b'{"prompt": "x", "min_p": 1e999}', b'{"prompt": "\\ud800"}', b"null"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_bad_bodies(http: httpx.Client, content: bytes, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    response = http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    error_of(response)


def test_the_missing_content_type_is_named(http: httpx.Client) -> None:
    kind = "application/x-www-form-urlencoded"  # what curl -d says
    response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_unknown_things(http: httpx.Client, client: openai.OpenAI) -> None:
    for method, path, status in (
        ("GET", "/v2/x", 404), ("POST", "/", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405),
    ):  # fmt: skip
        response = http.request(method, path)
        assert response.status_code == status
        error_of(response)
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x", max_tokens=600)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")


def test_a_body_too_large(http: httpx.Client, url: str) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 2000
        yield b'"}'

    for content in (b"x" * 5_000_000, pieces()):
        with httpx.Client(base_url=url) as fresh:
            response = fresh.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
    assert http.get("/health").status_code == 200


def test_detokenize_outside_the_vocabulary(http: httpx.Client) -> None:
    response = http.post("/detokenize", json={"tokens": [97, 4000]})
    assert (response.status_code, error_of(response)["param"]) == (400, "tokens")


def test_tokenize_wants_one_of_both(http: httpx.Client) -> None:
    for body in ({}, {"prompt": "x", "messages": CHAT}):
        assert http.post("/tokenize", json=body).status_code == 400


# -- keys, crowds, leaving, ending -------------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[FakeEngine]:
    """An engine of the test's own, to be broken."""
    engine = FakeEngine(step=0.002, max_num_seqs=2, max_waiting=2, max_model_len=100_000)
    engine.start()
    yield engine
    engine.shutdown()


LONG = {"prompt": "x", "max_tokens": 50_000}


def test_api_key(own: FakeEngine) -> None:
    with serving(own, ServerOptions(api_key="geheim€")) as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic geheim€".encode()}):
            response = http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={"authorization": "Bearer geheim€".encode()}).status_code == 200


def test_a_full_queue(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=20) as http, ThreadPoolExecutor() as pool:
        answers = [pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 200}) for _ in range(3)]
        eventually(lambda: own.stats().running + own.stats().waiting == 3)
        response = http.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        # Of the refused request's two outputs the one that was accepted is gone.
        assert own.stats().running + own.stats().waiting == 3
        assert [a.result().status_code for a in answers] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(own: FakeEngine, stream: bool) -> None:
    with serving(own) as url:
        address = url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
        with socket.create_connection((address[0], int(address[1]))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            eventually(lambda: own.stats().running == 2)
            if stream:
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: own.stats().running == 0)
        assert len(own.cancelled) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(own: FakeEngine, stream: bool) -> None:
    with serving(own) as url, httpx.Client(base_url=url) as http, ThreadPoolExecutor() as pool:
        running = pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 400, "n": 2}, timeout=20)
        eventually(lambda: own.stats().running == 2)
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG | {"stream": stream}, timeout=0.1)
        eventually(lambda: own.stats().waiting == 0)
        assert len(own.cancelled) == 1
        assert running.result().status_code == 200


def test_the_engine_fails(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=20) as http, ThreadPoolExecutor() as pool:
        whole = pool.submit(http.post, "/v1/completions", json=LONG)
        streamed = pool.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
        eventually(lambda: own.stats().running == 2)
        waiting = pool.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
        eventually(lambda: own.stats().waiting == 1)
        time.sleep(0.05)  # let the stream begin
        own.fail()
        for answer in (whole, waiting):  # nothing was sent yet: the status tells
            assert answer.result().status_code == 503
            assert error_of(answer.result())["code"] == "engine_dead"
        assert streamed.result().status_code == 200
        *_, last, done, _ = streamed.result().text.split("\n\n")
        assert "on fire" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        for response in (http.get("/health"), http.post("/v1/completions", json=COMPLETION)):
            assert response.status_code == 503
            assert "on fire" in error_of(response)["message"]
        assert http.get("/metrics").status_code == 200


def test_the_openai_client_sees_an_error_in_a_stream(own: FakeEngine) -> None:
    with serving(own) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        next(stream)
        own.fail()
        with pytest.raises(openai.APIError, match="on fire"):
            list(stream)


def test_draining(own: FakeEngine) -> None:
    with serving(own) as url, httpx.Client(base_url=url, timeout=20) as http, ThreadPoolExecutor() as pool:
        short = pool.submit(http.post, "/v1/completions", json={"prompt": "x", "max_tokens": 100})
        long = pool.submit(http.post, "/v1/completions", json=LONG)
        eventually(lambda: own.stats().running == 2)
        drained = pool.submit(own.shutdown, drain=True, timeout=1.0)
        eventually(lambda: own.health == "draining")
        for response in (http.get("/health"), http.post("/v1/completions", json=COMPLETION)):
            assert (response.status_code, error_of(response)["code"]) == (503, "draining")
        assert short.result().status_code == 200
        assert (long.result().status_code, error_of(long.result())["code"]) == (503, "aborted")
        drained.result()


def test_a_bug_is_answered_without_its_traceback(own: FakeEngine) -> None:
    own.tokenizer.encode = None  # type: ignore[assignment]
    with serving(own) as url:
        response = httpx.post(f"{url}/v1/completions", json=COMPLETION)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "NoneType" not in response.text


def test_many_streams_some_cut() -> None:
    """64 at once, every fifth leaves half-way: the others get all of theirs, and nothing is left behind."""

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        leaves = i % 5 == 0
        stream = await client.completions.create(
            model="fake", prompt=f"prompt {i}", max_tokens=50_000 if leaves else 200, seed=i, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves and len(text) > 90:
                await stream.close()
                break
        return text

    async def crowd(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    engine = FakeEngine(step=0.002, max_model_len=100_000)
    engine.start()
    with serving(engine) as url:
        texts = asyncio.run(crowd(url))
        for i, text in enumerate(texts):
            if i % 5:
                assert text == recited(200, i)
        eventually(lambda: engine.stats().running + engine.stats().waiting == 0)
        assert len(engine.cancelled) == 13
    engine.shutdown()
