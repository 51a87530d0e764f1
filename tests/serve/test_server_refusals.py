"""What the server refuses, and that it says which field is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from helpers.serving import CHAT, COMPLETION, error_of

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
    (COMPLETION | {"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"prompt": ["x"] * 5000}, "prompt"),
    (COMPLETION | {"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    (COMPLETION | {"bad_words": ["x" * 1001]}, "bad_words[0]"),
    (COMPLETION | {"bad_words": ["x"] * 257}, "bad_words"),
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
    (COMPLETION | {"response_format": {"type": "xml"}}, "response_format.type"),
    (COMPLETION | {"response_format": {"type": "json_schema"}}, "response_format"),
    (COMPLETION | {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    (COMPLETION | {"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format"),
    (COMPLETION | {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    (
        COMPLETION | {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
        "response_format",
    ),
    (COMPLETION | {"structured_outputs": {}}, "structured_outputs"),
    (COMPLETION | {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    (COMPLETION | {"structured_outputs": {"reggex": "a"}}, "structured_outputs.reggex"),
    (COMPLETION | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (COMPLETION | {"guided_json": {"if": {}}}, "guided_json"),
    (COMPLETION | {"min_tokens": -1}, "min_tokens"),
    (COMPLETION | {"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    (COMPLETION | {"allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETION | {"bad_words": [" "]}, "bad_words"),
    (COMPLETION | {"prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETION | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETION | {"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
    (COMPLETION | {"truncation_side": "up"}, "truncation_side"),
    (COMPLETION | {"max_completion_tokens": 1000}, "max_completion_tokens"),
    (COMPLETION | {"use_beam_search": True}, "use_beam_search"),
    (COMPLETION | {"mirostat": 2}, "mirostat"),
    (COMPLETION | {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    (COMPLETION | {"cache_salt": "x"}, "cache_salt"),
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
    (MESSAGES | {"functions": [{"name": "f"}]}, "functions"),
    (MESSAGES | {"modalities": ["audio"]}, "modalities"),
    (MESSAGES | {"chat_template": "{{ messages }}"}, "chat_template"),
    (MESSAGES | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (MESSAGES | {"continue_final_message": True}, "continue_final_message"),
    (MESSAGES | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
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
        ("GET", "/v2/x", 404), ("POST", "/", 405), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405),
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


def test_what_a_body_nests_too_deeply(http: httpx.Client) -> None:
    """Answers repeat parts of it: `metadata` and the parameters of tools."""
    for depth, status in ((100, 200), (200, 400), (1000, 400)):
        content = b'{"input": "x", "max_output_tokens": 1, "metadata": {"a": %s}}' % (b"[" * depth + b"]" * depth)
        response = http.post("/v1/responses", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status
        if status == 400:
            assert error_of(response)["code"] == "invalid_body"


def test_messages_repeat_no_long_values(http: httpx.Client) -> None:
    for field, value in (("bad_words", ["", *["word"] * 255]), ("stop", ["", *["x" * 900] * 15]), ("n", 10**300)):
        assert len(error_of(http.post("/v1/completions", json=COMPLETION | {field: value}))["message"]) < 500
    for body in ({"model": "x" * 9000}, {"structured_outputs": {"y" * 9000: 1}}, {"stream": "z" * 9000}):
        assert sum(map(len, map(str, error_of(http.post("/v1/completions", json=COMPLETION | body)).values()))) < 1500


def test_long_texts_are_refused_before_they_are_encoded(http: httpx.Client) -> None:
    """By their length alone: of characters, a token has at most those of the longest one."""
    long = "x" * 90_000
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": long, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/responses", {"input": long}, "input"),
    ):
        error = error_of(http.post(path, json=body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "characters" in error["message"]


def test_allowed_tools_that_are_no_list(http: httpx.Client) -> None:
    tool = {"type": "function", "name": "f"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": 5}
    response = http.post("/v1/responses", json={"input": "x", "tools": [tool], "tool_choice": choice})
    assert (response.status_code, error_of(response)["param"]) == (400, "tool_choice")
