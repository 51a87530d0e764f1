"""Fields of vLLM's and OpenAI's requests: each has its effect on the prompt, the engine or the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from helpers.fakes import FakeEngine, recited
from helpers.serving import CHAT
from jaxspec import StructuredOutputs


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": "hello", "seed": 0, "max_tokens": 4} | body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post(path, json=body | {"stream": True}).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def test_constraints_reach_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    complete(http, min_tokens=2, allowed_token_ids=[1, 2], bad_words=["no"], prompt_logprobs=1)
    params = engine.submitted[-1]
    assert (params.min_tokens, params.allowed_token_ids, params.bad_words) == (2, [1, 2], ["no"])
    assert params.prompt_logprobs == 1


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": {"type": "integer"}}}, {"json": {"type": "integer"}}),
        ({"guided_json": '{"type": "integer"}'}, {"json": '{"type": "integer"}'}),
        ({"json_schema": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["x"]}, {"choice": ["x"]}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            {"json": {"type": "null"}},
        ),
    ],
)
def test_structures_have_many_names(
    http: httpx.Client, engine: FakeEngine, field: dict[str, Any], expected: dict[str, Any]
) -> None:
    complete(http, **field)
    assert engine.submitted[-1].structured_outputs == StructuredOutputs(**expected)


def test_harmless_and_neutral_fields_pass(http: httpx.Client) -> None:
    complete(
        http, user="me", metadata={"a": "b"}, store=False, service_tier="auto", use_beam_search=False, mirostat=0,
        typical_p=1.0, length_penalty=1.0, prompt_embeds=None, response_format={"type": "text"}, modalities=["text"],
    )  # fmt: skip


def test_max_completion_tokens_everywhere(http: httpx.Client) -> None:
    assert complete(http, max_tokens=None, max_completion_tokens=7)["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "lo"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "he"),
        ({"truncate_prompt_tokens": -1}, "hello"),
        ({"truncate_prompt_tokens": -1, "prompt": "x" * 600 + "end", "max_tokens": 509}, "end"),
    ],
)
def test_prompts_are_truncated(http: httpx.Client, fields: dict[str, Any], kept: str) -> None:
    answer = complete(http, **fields, return_token_ids=True)
    assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == kept


def test_token_ids_and_prompt_logprobs(http: httpx.Client) -> None:
    (choice,) = complete(http, return_token_ids=True, prompt_logprobs=0)["choices"]
    assert bytes(choice["token_ids"]).decode() == choice["text"] == recited(4)
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 5
    assert choice["prompt_logprobs"][1][str(ord("e"))]["decoded_token"] == "e"
    body = {"messages": CHAT, "seed": 0, "max_tokens": 4, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert bytes(answer["prompt_token_ids"]).decode() == "[user]Hallo\n[assistant]"
    assert bytes(answer["choices"][0]["token_ids"]).decode() == recited(4)
    chunks = chunks_of(http, "/v1/chat/completions", body)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"] and "prompt_token_ids" not in chunks[1]
    ids = [id for c in chunks for id in c["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]


def test_tokens_as_ids(http: httpx.Client) -> None:
    (choice,) = complete(http, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in recited(4).encode()]


def test_usage_so_far_in_every_chunk(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 9, "stream_options": {"continuous_usage_stats": True}}
    counts = [c["usage"]["completion_tokens"] for c in chunks_of(http, "/v1/completions", body)]
    assert counts == sorted(counts) and counts[-1] == 9 and counts[0] < 9


def test_timings(http: httpx.Client) -> None:
    timings = complete(http, n=2)["timings"]
    assert timings["ttft_ms"] >= timings["queue_ms"] >= 0
    assert timings["tokens_per_second"] > 0 and timings["preemptions"] == 0


def test_how_messages_become_a_prompt(http: httpx.Client) -> None:
    def prompt(**body: Any) -> str:
        answer = http.post("/tokenize", json={"messages": CHAT} | body).json()
        return bytes(answer["tokens"]).decode()

    assert prompt(add_generation_prompt=False) == "[user]Hallo\n"
    said = [*CHAT, {"role": "assistant", "content": "Guten"}]
    assert prompt(messages=said, continue_final_message=True) == "[user]Hallo\n[assistant]Guten"
    assert prompt(messages=[*CHAT, {"role": "assistant", "content": None}]).endswith("[assistant]\n[assistant]")
    shown = prompt(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert shown.startswith("(reasoning_effort=low)(enable_thinking=False)")
    strings = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()["token_strs"]
    assert strings == ["a", "b"]


def test_a_model_may_have_several_names(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["fake", "alias"]
    assert client.completions.create(model="alias", prompt="x").model == "alias"


def test_browsers_and_proxies(http: httpx.Client) -> None:
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    answer = http.options("/v1/chat/completions", headers=asked | {"Access-Control-Request-Headers": "authorization"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
    answer = http.get("/version", headers={"X-Request-Id": "me-1", "Origin": "http://localhost:3000"})
    assert answer.json()["version"] and answer.headers["x-request-id"] == "me-1"
    assert answer.headers["access-control-allow-origin"] == "*"
    for bad in ("", "x" * 129, "a b"):
        id = http.get("/ping", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert id != bad and len(id) == 32
    assert "x-request-id" in http.get("/nowhere").headers
