"""Tools over HTTP, with OpenAI's client: a fake engine recites answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from helpers.live_server import started
from helpers.patience import PATIENCE
from helpers.serving import error_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = f"Let me see.\n{CALL}\n{CALL}"
ASK: list[Any] = [{"role": "user", "content": "1 + 2?"}]
PARAMETERS = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]
}  # fmt: skip
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
IF: Any = {"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}
#: A call whose arguments are not JSON.
BROKEN = {"function": {"name": "f", "arguments": "{"}}
NOW: Any = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, str]]:
    with started(text=ANSWER, max_model_len=2048) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(served: tuple[Any, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_calls_of_a_whole_answer(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model="fake", messages=ASK, tools=[ADD], max_tokens=300)
    (choice,) = got.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls: list[Any] = choice.message.tool_calls or []
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("function", "add", {"a": 1, "b": 2})
    ] * 2
    assert len({c.id for c in calls}) == 2


def test_calls_of_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="fake", messages=ASK, tools=[ADD], max_tokens=300, stream=True)
    content, names, arguments, ends = "", {}, {0: "", 1: ""}, []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.index not in names
                names[call.index] = call.function.name
            arguments[call.index] += call.function.arguments or ""
        ends.append(choice.finish_reason)
    assert (content, names, ends[-1]) == ("Let me see.", {0: "add", 1: "add"}, "tool_calls")
    assert [json.loads(text) for text in arguments.values()] == [{"a": 1, "b": 2}] * 2


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_the_text_is_content(client: openai.OpenAI, choice: Any) -> None:
    tools = {"tools": [ADD], "tool_choice": choice} if choice else {}
    got = client.chat.completions.create(model="fake", messages=ASK, max_tokens=300, **tools)
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == (ANSWER, "stop")


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    tokens = ANSWER.index('"b"')
    got = client.chat.completions.create(model="fake", messages=ASK, tools=[ADD], max_tokens=tokens)
    (choice,) = got.choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"a": 1, '


@pytest.mark.parametrize(
    ("changes", "grammar"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
        ({"tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
                }
            },
            True,
        ),
    ],
)
def test_a_grammar_where_calls_must_match(served: tuple[Any, str], changes: Any, grammar: bool) -> None:
    engine, url = served
    body = {"messages": ASK, "tools": [ADD, NOW], "max_tokens": 300, **changes}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).raise_for_status()
    outputs = engine.submitted[-1].structured_outputs
    assert (outputs is not None) == grammar
    if "allowed_tools" in str(changes) or "'name': 'add'" in str(changes.get("tool_choice")):
        assert "add" in outputs.grammar
        assert "now" not in outputs.grammar


def test_a_named_function_keeps_openais_finish_reason(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    got = client.chat.completions.create(model="fake", messages=ASK, tools=[ADD], max_tokens=300, tool_choice=choice)
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].message.tool_calls


def test_results_of_tools_are_part_of_the_prompt(served: tuple[Any, str]) -> None:
    _, url = served
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]  # fmt: skip
    got = httpx.post(f"{url}/tokenize", json={"messages": messages, "tools": [ADD]}).json()
    prompt = bytes(got["tokens"]).decode()
    assert '"name": "add", "description": "Adds."' in prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\n3\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("changes", "param", "part"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", "must be none"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub'"),
        ({"tools": [ADD, ADD]}, "tools", "two functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [ADD], "tool_choice": "required", "regex": "a"}, "regex", "only JSON"),
        ({"tools": [IF], "tool_choice": "required"}, "tools", "if"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "required"),
        ({"messages": [{**ASK[0], "tool_calls": [BROKEN]}]}, "messages[0]", "assistant"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [BROKEN]}]}, "messages", "[0].function.arguments"),
    ],
)
def test_refusals_name_the_field(served: tuple[Any, str], changes: Any, param: str, part: str) -> None:
    _, url = served
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **changes}, timeout=PATIENCE)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert part in error["message"]


def test_completions_have_no_tools(served: tuple[Any, str]) -> None:
    _, url = served
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "tools": [ADD]})
    assert error_of(response)["param"] == "tools"
