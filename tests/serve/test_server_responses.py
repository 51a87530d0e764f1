"""`/v1/responses` with OpenAI's client: a fake engine recites answers."""

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

TEXT = "<think>Hm.</think>Sure.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>"  # fmt: skip
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, str]]:
    with started(text=TEXT, max_model_len=2048) as (engine, url):
        engine.tokenizer.chat_template = "<think> </think>"
        yield engine, url


@pytest.fixture(scope="module")
def client(served: tuple[Any, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_items(items: Any) -> None:
    reasoning, message, call = items
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.role, message.content[0].text) == ("message", "assistant", "Sure.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
    assert {item.status for item in items} == {"completed"}


def test_a_whole_response(client: openai.OpenAI) -> None:
    got = client.responses.create(
        model="fake", input="1 + 1?", instructions="Add.", tools=[ADD], metadata={"a": "b"}, temperature=0.5
    )
    check_items(got.output)
    assert (got.status, got.output_text, got.metadata, got.temperature) == ("completed", "Sure.", {"a": "b"}, 0.5)
    assert got.usage is not None
    assert got.usage.output_tokens == len(TEXT)
    assert got.usage.output_tokens_details.reasoning_tokens == TEXT.index("Sure")
    assert got.tools[0].type == "function"


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="1 + 1?", tools=[ADD], stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    check_items(last.response.output)
    deltas = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
    for event in events:
        if event.type in deltas:
            deltas[event.type] += getattr(event, "delta", "")
    assert list(deltas.values()) == ["Sure.", '{"a": 1}']
    ended = [e.item.type for e in events if e.type == "response.output_item.done"]
    assert ended == ["reasoning", "message", "function_call"]


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="1 + 1?", tools=[ADD]) as stream:
        for _ in stream:
            pass
        check_items(stream.get_final_response().output)


def test_a_response_that_is_cut(client: openai.OpenAI) -> None:
    got = client.responses.create(model="fake", input="x", max_output_tokens=len("<think>Hm.</think>Su"))
    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert (got.incomplete_details.reason, got.output_text) == ("max_output_tokens", "Su")


def test_a_conversation_becomes_a_prompt(client: openai.OpenAI, served: tuple[Any, str]) -> None:
    prompts: list[str] = []
    engine, submit = served[0], served[0].submit
    engine.submit = lambda ids, *a, **k: (prompts.append(bytes(ids).decode()), submit(ids, *a, **k))[1]
    call: Any = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'}
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]}, call,
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}, call,
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is 2.", "annotations": []}]},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    try:
        client.responses.create(model="fake", input=conversation, instructions="Add.")
    finally:
        engine.submit = submit
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert prompts == [
        f"[system]Add.\n[user]1 + 1?\n[assistant]{shown}\n{shown}\n"
        "[user]<tool_response>\n2\n</tool_response>\n[assistant]It is 2.\n[user]Thanks.\n[assistant]"
    ]


def test_fields_reach_the_engine(client: openai.OpenAI, served: tuple[Any, str]) -> None:
    schema: Any = {"type": "object", "properties": {}}
    client.responses.create(
        model="fake", input="x", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}, top_p=0.5,
        top_logprobs=2, extra_body={"seed": 5, "slo": {"tpot_ms": 100}},
    )  # fmt: skip
    params = served[0].submitted[-1]
    assert (params.structured_outputs.json, params.top_p, params.seed, params.logprobs) == (schema, 0.5, 5, 2)
    assert served[0].slos[-1].tpot == 0.1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"return_accepted_drafts": True, "stream": True}, "return_accepted_drafts"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),  # the fake template refuses it
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 1000.0}, "temperature"),
    ],
)
def test_refusals_name_the_field(served: tuple[Any, str], changes: Any, param: str) -> None:
    response = httpx.post(f"{served[1]}/v1/responses", json={"input": "x", **changes}, timeout=PATIENCE)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_a_wrong_item_is_named(served: tuple[Any, str]) -> None:
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}]
    response = httpx.post(f"{served[1]}/v1/responses", json={"input": items}, timeout=PATIENCE)
    assert error_of(response)["message"] == "input: [1]: needs call_id and arguments"


def test_logprobs_are_those_of_the_content() -> None:
    """Tokens of reasoning have none, and characters of several tokens lose none."""
    content = "Zwei 🦉!"
    with started(text=f"<think>Hm.</think>{content}") as (engine, url):
        engine.tokenizer.chat_template = "<think> </think>"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask: Any = {"model": "fake", "input": "x", "top_logprobs": 1}
            events = list(client.responses.create(**ask, stream=True))
            streamed = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
            (_, message) = client.responses.create(**ask).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert bytes(b for entry in part.logprobs or [] for b in entry.bytes) == content.encode()
    assert [e.token for e in streamed] == [e.token for e in part.logprobs or []]
    opened = [event.part for event in events if event.type == "response.content_part.added"]
    assert [getattr(part, "logprobs", None) or [] for part in opened] == [[], []]


def test_reasoning_may_be_left_out(client: openai.OpenAI) -> None:
    got = client.responses.create(model="fake", input="x", extra_body={"include_reasoning": False})
    assert [item.type for item in got.output] == ["message"]


def test_a_stream_that_fails_early_has_begun() -> None:
    with started(step=0.2) as (engine, url):
        body = {"model": "fake", "input": "x", "stream": True}
        with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            engine.fail()
            names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[0] == "response.in_progress"
    assert names[-1] == "response.failed"


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="stores none"):
        client.responses.retrieve("resp_1")
