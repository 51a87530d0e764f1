"""Structured output and tools of a real engine with a tiny random model, over HTTP with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from helpers import tiny
from helpers.fakes import ByteTokenizer, as_tokenizer
from helpers.generation import check_clean
from helpers.patience import PATIENCE
from helpers.serving import serving
from jaxspec.llm import LLM
from jaxspec.models.load import LoadedModel

COLOURS = ("red", "green", "blue")
PARAMETERS: dict[str, Any] = {
    "type": "object", "required": ["colour", "count"], "additionalProperties": False,
    "properties": {"colour": {"enum": list(COLOURS)}, "count": {"type": "integer", "maximum": 9, "minimum": 0}},
}  # fmt: skip
PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
ASK: list[Any] = [{"role": "user", "content": "Paint."}]


class Picture(BaseModel):
    colour: Literal["red", "green", "blue"]
    dots: list[bool] = Field(max_length=3)


@pytest.fixture(scope="module", params=[(), ("ngram",)], ids=["plain", "ngram"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    config = tiny.config(max_position=4096)
    loaded = LoadedModel(config, tiny.weights(config), as_tokenizer(ByteTokenizer()), "tiny")
    settings: dict[str, Any] = {"token_buckets": [16, 256], "max_num_seqs": 8, "compile_in_background": False}
    with LLM(loaded, draft=request.param, **settings) as llm:
        with (
            serving(llm.engine) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
        ):
            yield client
        check_clean(llm)


def test_parse_returns_an_object(client: openai.OpenAI) -> None:
    for seed in range(3):
        got = client.chat.completions.parse(
            model="tiny", messages=ASK, response_format=Picture, max_tokens=900, seed=seed
        )
        (choice,) = got.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Picture)


def test_a_tool_loop_of_three_turns(client: openai.OpenAI) -> None:
    messages = list(ASK)
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "stop"}}, "none"]
    names: list[list[str]] = []
    for seed, choice in enumerate(choices):
        got = client.chat.completions.create(
            model="tiny", messages=messages, tools=[PAINT, STOP], tool_choice=choice, max_tokens=900, seed=seed,
            parallel_tool_calls=False,
        )  # fmt: skip
        message = got.choices[0].message
        calls: list[Any] = message.tool_calls or []
        names.append([call.function.name for call in calls])
        messages.append(message.model_dump(exclude_none=True))
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "paint":
                jsonschema.validate(arguments, PARAMETERS)
            else:
                assert arguments == {}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    first, second, third = names
    assert len(first) == 1
    assert (second, third) == (["stop"], [])
    assert len(messages) == 1 + 2 + 2 + 1


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI, choice: Any) -> None:
    strict: Any = {"type": "function", "function": {**PAINT["function"], "strict": True}}
    ask: Any = {
        "model": "tiny",
        "messages": ASK,
        "tools": [strict],
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 5,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    content, calls, reason = "", list[list[Any]](), None
    for chunk in client.chat.completions.create(**ask, stream=True):
        (part,) = chunk.choices
        content += part.delta.content or ""
        reason = part.finish_reason or reason
        for call in part.delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    assert reason == whole.finish_reason
    assert content == (whole.message.content or "")
    wanted: list[Any] = whole.message.tool_calls or []
    assert calls == [[call.function.name, call.function.arguments] for call in wanted]
    assert (choice == "auto") or calls


def test_responses_with_a_format_and_a_tool(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "input": "Paint.", "max_output_tokens": 900, "extra_body": {"seed": 1}}
    got = client.responses.parse(**ask, text_format=Picture)
    assert isinstance(got.output_parsed, Picture)
    tool: Any = {"type": "function", "name": "paint", "parameters": PARAMETERS, "strict": True}
    ask |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    done = list(client.responses.create(**ask))[-1]
    assert done.type == "response.completed"
    for item in done.response.output:
        assert item.type == "function_call"
        jsonschema.validate(json.loads(item.arguments), PARAMETERS)


def test_a_structural_tag(client: openai.OpenAI) -> None:
    tag = {
        "type": "structural_tag", "triggers": ["<"],
        "structures": [{"begin": "<paint>", "schema": PARAMETERS, "end": "</paint>"}],
    }  # fmt: skip
    tags = 0
    for seed in range(4):
        got = client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=300, seed=seed, extra_body={"response_format": tag}
        )
        content = got.choices[0].message.content or ""
        # After "<" nothing but a tag; the last one may be cut.
        for part in content.split("<")[1:-1]:
            assert part.startswith(("paint>", "/paint>"))
            if part.startswith("paint>"):
                jsonschema.validate(json.loads(part.removeprefix("paint>")), PARAMETERS)
                tags += 1
    assert tags
