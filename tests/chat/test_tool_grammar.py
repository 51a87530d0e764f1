"""Grammars of answers with tool calls: what each format allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.chat.formats import FORMATS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, ToolFormat
from jaxspec.chat.grammar import tool_grammar
from jaxspec.chat.tools import Tool, ToolUse
from jaxspec.constraints.grammar import Grammars
from jaxspec.structured_outputs import StructuredOutputs

INTEGER: Any = {"type": "integer"}
ADD = Tool("add", {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": False}, strict=True)
NOW = Tool('now"', strict=True)
CONTENT: Any = {"type": "object", "properties": {"r": INTEGER}, "required": ["r"], "additionalProperties": False}
PLAIN = ByteTokenizer()
#: All tags are control tokens, which texts cannot spell.
SPECIAL = ByteTokenizer([b"<tool_call>", b"</tool_call>", b"<|python_tag|>", b"[TOOL_CALLS]", b"[ARGS]"])
SPECIAL.special_ids = frozenset(range(256, SPECIAL.vocab_size))


@pytest.fixture(scope="module", params=[PLAIN, SPECIAL], ids=["text", "special"])
def grammars(request: pytest.FixtureRequest) -> Iterator[tuple[Grammars, ByteTokenizer]]:
    built = Grammars(as_tokenizer(request.param), request.param.vocab_size)
    yield built, request.param
    built.close()


def tokens(tokenizer: ByteTokenizer, text: str) -> list[int]:
    """Tags as their tokens, all else as bytes."""
    out: list[int] = []
    while text:
        tag = next((t for form in FORMATS.values() for t in form.tags if text.startswith(t)), "")
        id = tokenizer.special_id(tag) if tag else None
        part = tag if id is not None else text[0]
        out += [id] if id is not None else part.encode()
        text = text.removeprefix(part)
    return out


def accepts(grammars: tuple[Grammars, ByteTokenizer], grammar: str, text: str) -> bool:
    """Whether the text is a complete answer of the grammar."""
    built, tokenizer = grammars
    matcher = built.matcher(StructuredOutputs(grammar=grammar))
    taken = all(not matcher.finished and matcher.consume(token) for token in tokens(tokenizer, text))
    return taken and (matcher.finished or matcher.consume(tokenizer.end_id))


def one(form: ToolFormat, name: str, arguments: Any) -> str:
    if form.name_first:
        return f"{name}{form.separator}{json.dumps(arguments)}"
    return json.dumps({"name": name, form.key: arguments})


def written(form: ToolFormat, *calls: str) -> str:
    if form is MISTRAL:
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    if form is LLAMA:
        return "; ".join(calls)
    return "\n".join(f"{form.begin}{call}{form.end}" for call in calls)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_what_a_grammar_allows(grammars: tuple[Grammars, ByteTokenizer], form: ToolFormat) -> None:
    tokenizer = as_tokenizer(grammars[1])
    add, now = one(form, "add", {"a": 1}), one(form, 'now"', {})
    wrong = [one(form, "sub", {"a": 1}), one(form, "add", {"a": "1"}), one(form, "add", 3), one(form, 'now"', {"x": 1})]
    calls, call = written(form, add, now), written(form, add)

    def allowed(use: ToolUse, *texts: str, content: Any = None) -> list[bool]:
        grammar = tool_grammar(use, form, tokenizer, content)
        return [accepts(grammars, grammar, text) for text in texts]

    tools = (ADD, NOW)
    assert allowed(ToolUse(tools, required=True), call, calls, "Hello", "") == [True, True, False, False]
    assert allowed(ToolUse(tools, required=True, parallel=False), call, calls) == [True, False]
    assert not any(allowed(ToolUse(tools, required=True), *(written(form, text) for text in wrong)))
    assert allowed(ToolUse(tools), call, calls, "Hello <b> [x].\n", "") == [True] * 4
    assert not any(allowed(ToolUse(tools), *(written(form, text) for text in wrong)))
    if form.bare:
        assert not any(allowed(ToolUse(tools), *(f" \n{text}" for text in wrong)))
    else:
        assert allowed(ToolUse(tools), f"So: {call}") == [True]
    assert allowed(ToolUse(tools), '{"r": 1}', call, "Hello", '{"r": "1"}', content=CONTENT) == [
        True, True, False, False
    ]  # fmt: skip


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["object", "null"]}, False, {"minProperties": 9}])
def test_parameters_that_cannot_be_followed_are_named(parameters: Any) -> None:
    use = ToolUse((ADD, Tool("other", parameters)), required=True)
    for form in (HERMES, MISTRAL_ARGS):
        with pytest.raises(ValueError, match="the parameters of 'other' are not possible"):
            tool_grammar(use, form, as_tokenizer(PLAIN))
