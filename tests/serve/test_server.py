"""The server against an engine that recites: requests, answers and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from helpers.fakes import RECITED, FakeEngine, recited
from helpers.serving import CHAT
from jaxspec.sched.slo import Slo

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
        answer: Any = client.completions.create(
            model="fake", prompt="x", stop=["sagt:", "nie"], max_tokens=200, stream=stream,
            extra_body={"include_stop_str_in_output": include},
        )  # fmt: skip
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        assert "".join(c.text for c in choices) == "Die Eule " + end
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == "sagt:"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_and_echo(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
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
    answer: Any = client.chat.completions.create(
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
    assert engine.slos[-1] == Slo(tpot=0.0205, ttft=0.1)


# -- other routes ------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    card = next(iter(client.models.list()))
    assert (card.id, card.to_dict()["max_model_len"], card.to_dict()["dtype"]) == ("fake", 512, "float32")
    assert client.models.retrieve("fake").owned_by == "jaxspec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "aé"}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == ([97, 0xC3, 0xA9], 3, 512)
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}


def test_health_and_schema(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ok"
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
        "num_pauses_total", "recomputed_tokens_total", "recompute_seconds_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
        "compilations_after_warmup_total",
    ):  # fmt: skip
        assert metric(after, name) == 0
