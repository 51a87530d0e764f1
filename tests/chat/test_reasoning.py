"""Reasoning and content of answers."""

from __future__ import annotations

import pytest

from jaxspec.chat.parser import ChatParser
from jaxspec.chat.reasoning import Reasoning, reasoning_of

TEMPLATE = "… <think> … </think> …"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content", "tokens"),
    [
        (False, "<think>\nOne <b> two\n</think>\n\nThree\n", "One <b> two", "Three\n", 28),
        (False, "\n<think></think>x", "", "x", 16),
        (False, "  Three", "", "  Three", 0),
        (False, "<thi", "", "<thi", 0),
        (False, "a <think>b</think>", "", "a <think>b</think>", 0),
        (True, "\nOne\n\ntwo </think>Three", "One\n\ntwo", "Three", 18),
        (True, "One </thin", "One </thin", "", 10),
        (True, "One ", "One", "", 4),
    ],
)
def test_an_answer_is_split(opened: bool, text: str, reasoning: str, content: str, tokens: int, size: int) -> None:
    parser = ChatParser(Reasoning("<think>", "</think>", opened), None, lambda id: bytes([id]))
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in parser.feed(part, list(part.encode()))] + parser.finish()
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == reasoning
    assert "".join(p.text for p in pieces if p.kind == "content") == content
    assert parser.reasoning_tokens == tokens


@pytest.mark.parametrize(
    ("template", "prompt", "continued", "form"),
    [
        (None, "user: hi", False, None),
        ("no tags", "user: hi", False, None),
        (TEMPLATE, "user: hi\nassistant:", False, Reasoning("<think>", "</think>")),
        (TEMPLATE, "<think>old</think>\nassistant:<think>\n", False, Reasoning("<think>", "</think>", True)),
        (TEMPLATE, "assistant:<think>\n\n</think>\n\n", False, None),
        (TEMPLATE, "assistant: <think> so", True, Reasoning("<think>", "</think>", True)),
        (TEMPLATE, "assistant: <think> so </think> yes", True, None),
        ("[THINK] [/THINK]", "hi", False, Reasoning("[THINK]", "[/THINK]")),
    ],
)
def test_how_an_answer_begins(template: str | None, prompt: str, continued: bool, form: Reasoning | None) -> None:
    assert reasoning_of(template, prompt, continued) == form
