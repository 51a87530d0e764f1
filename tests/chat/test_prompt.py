"""Prompts of conversations with tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from jaxspec.chat.prompt import render
from jaxspec.models.load.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
KNOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS: list[Any] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
]


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template)


def test_a_template_without_tools_gets_them_as_text() -> None:
    prompt = render(tokenizer(PLAIN), TURNS, [TOOL], {})
    system, rest = prompt.split("[user]1 + 1?\n")
    assert system.startswith("[system]")
    assert json.dumps(TOOL) in system
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert rest == f"[assistant]{call}\n{call}\n[user]{results}\n"


def test_a_system_message_keeps_its_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    prompt = render(tokenizer(PLAIN), [system, *TURNS[:1]], [TOOL], {})
    assert prompt.startswith("[system]Be brief.\n\nYou can call")
    assert render(tokenizer(PLAIN), [system], [], {}) == "[system]Be brief.\n"


def test_a_template_with_tools_gets_arguments_as_objects() -> None:
    assert render(tokenizer(KNOWS_TOOLS), TURNS[:2], [TOOL], {}) == "add;1 + 1?None11"


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "[" * 5000])
@pytest.mark.parametrize("template", [PLAIN, KNOWS_TOOLS])
def test_arguments_that_are_no_object_are_named(arguments: str, template: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        render(tokenizer(template), [TURNS[0], {"role": "assistant", "tool_calls": [call]}], [TOOL], {})
