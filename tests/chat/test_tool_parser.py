"""Tool calls in the text of answers: the same, however the text is split into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.chat.formats import FORMATS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, ToolFormat, format_of
from jaxspec.chat.pieces import Piece
from jaxspec.chat.tool_parser import ToolParser

Calls = list[tuple[str, Any]]
ROME: Any = ("get_weather", {"city": 'Rome, "IT" {}[]', "days": [1, {"x": None}]})
SUM = ("add", {"a": 1, "b": -2.5})


def parsed(form: ToolFormat, parts: list[str]) -> tuple[str, Calls]:
    """The content and the calls of an answer whose text arrives in these parts."""
    parser = ToolParser(form, ["get_weather", "add"])
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    names = [p.text for p in pieces if p.kind == "call"]
    assert [p.index for p in pieces if p.kind == "call"] == list(range(len(names)))
    arguments = ["".join(p.text for p in pieces if p.kind == "arguments" and p.index == i) for i in range(len(names))]
    content = "".join(p.text for p in pieces if p.kind == "content")
    assert parser.calls == len(names)
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def written(form: ToolFormat, calls: Calls) -> str:
    """The calls as a model writes them."""
    objects = [json.dumps({"name": name, form.key: arguments}) for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    if form is LLAMA:
        return "; ".join(objects)
    if form is MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


@given(form=st.sampled_from(list(FORMATS.values())), calls=st.integers(1, 3), data=st.data())
def test_calls_do_not_depend_on_the_parts(form: ToolFormat, calls: int, data: st.DataObject) -> None:
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
    arguments = st.dictionaries(st.text(), json_values, max_size=3)
    wanted = [(data.draw(st.sampled_from(["get_weather", "add"])), data.draw(arguments)) for _ in range(calls)]
    before = "" if form.bare else data.draw(st.sampled_from(["", "Let me see.", "a < b [x]"]))
    text = before + written(form, wanted)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(form, parts) == (before, wanted)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
@pytest.mark.parametrize(
    "text", ["", "Hello.\n", " a <tool> of {x} ", "<tool", "[1, 2]", "So [TOOL", '{"answer": 42}\n', "{", "<|python"]
)
def test_other_text_stays_as_it_is(form: ToolFormat, text: str) -> None:
    assert parsed(form, list(text)) == (text, [])
    assert parsed(form, [text]) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"Sure.\n{written(HERMES, [ROME])}\n", "Sure.", [ROME]),
        (HERMES, f"\n\n{written(HERMES, [ROME, SUM])}\nDone.", "\nDone.", [ROME, SUM]),
        (HERMES, f"<tool_call>[{json.dumps({'name': 'add', 'arguments': {}})}]</tool_call>", "", [("add", {})]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
        (HERMES, "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (HERMES, '<tool_call>\n{"na', '<tool_call>\n{"na', []),
        (HERMES, '<tool_call>{"name": "add", "arguments": {}, "name": 3}</tool_call>.', ".", [("add", {})]),
        (MISTRAL, written(MISTRAL, [SUM]) + " I set {x} to 1", "I set {x} to 1", [SUM]),
        (MISTRAL, "[TOOL_CALLS] a b {}", "[TOOL_CALLS] a b {}", []),
        (LLAMA, f"<|python_tag|>{written(LLAMA, [SUM])}", "", [SUM]),
        (LLAMA, '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        (LLAMA, 'Here: {"name": "add", "parameters": {}}', 'Here: {"name": "add", "parameters": {}}', []),
        (MISTRAL, written(MISTRAL_ARGS, [ROME, SUM]), "", [ROME, SUM]),
        (MISTRAL_ARGS, written(MISTRAL, [ROME, SUM]), "", [ROME, SUM]),
        (MISTRAL_ARGS, '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    ],
)
def test_forms(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert parsed(form, [text]) == (content, calls)
    assert parsed(form, list(text)) == (content, calls)


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser(HERMES, ["add"])
    parser.feed('<tool_call>{"name": "add", ')
    assert parser.feed('"arguments": {"a"') == [Piece("arguments", '{"a"')]
    assert parser.feed(": 1, ") == [Piece("arguments", ": 1, ")]
    assert parser.feed('"b": 2}}') == [Piece("arguments", '"b": 2}')]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ('{"name": function, "parameters": {}} <|python_tag|>', LLAMA),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", MISTRAL_ARGS),
    ],
)
def test_the_format_is_the_templates(template: str | None, form: ToolFormat) -> None:
    assert format_of(template) is form
