"""Which format of tool calls the server reads: the setting's, or the chat template's."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.live_server import ask, started

TOOL: Any = {"type": "function", "function": {"name": "add"}}
ANSWERS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]add[ARGS]{}",
}
TEMPLATES = {
    "hermes": "tools <tool_call>",
    "llama3_json": "tools <|python_tag|>",
    "mistral": "tools [TOOL_CALLS]",
    "mistral_args": "tools [TOOL_CALLS]name[ARGS]",
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("by", ["template", "setting"])
def test_the_call_is_read(name: str, by: str) -> None:
    with started(text=ANSWERS[name]) as (engine, url):
        engine.tokenizer.chat_template = TEMPLATES[name] if by == "template" else "tools"
        engine.config.tool_call_parser = "auto" if by == "template" else name
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 200}
        (choice,) = ask(url, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "{}"}
    assert len(call["id"]) == (9 if name.startswith("mistral") else 29)
