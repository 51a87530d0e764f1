"""Structural tags: free text, and tags whose content matches a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec import InvalidRequest, StructuredOutputs
from jaxspec.constraints.grammar import Grammars

TOKENIZER = ByteTokenizer([b"<c>"])
TOKENIZER.special_ids = frozenset({TOKENIZER.end_id, 256})
INTEGER: Any = {"type": "integer", "minimum": 0, "maximum": 99}
TAG: Any = {
    "triggers": ["<f=", "<c>"],
    "structures": [
        {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<c>", "schema": INTEGER, "end": ""},
    ],
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    built = Grammars(as_tokenizer(TOKENIZER), TOKENIZER.vocab_size)
    yield built
    built.close()


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Nothing <b> here", True),
        ("One <f=a>12</f>, two <f=b>true</f>.", True),
        ("One <f=a>true</f>", False),
        ("One <f=c>1</f>", False),
        ("<f=a>12", False),
        (b"A \x007 B", True),  # 0 stands for the control token <c>
        (b"A \x00 B", False),
    ],
)
def test_what_it_allows(grammars: Grammars, text: str | bytes, allowed: bool) -> None:
    raw = text.encode() if isinstance(text, str) else text
    matcher = grammars.matcher(StructuredOutputs(structural_tag=TAG))
    taken = all(matcher.consume(256 if byte == 0 else byte) for byte in raw)
    assert (taken and matcher.consume(TOKENIZER.end_id)) == allowed


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"triggers": []}, "needs triggers"),
        ({"structures": "x"}, "needs structures"),
        ({"triggers": [3]}, "triggers must be strings"),
        ({"triggers": ["<f=", "<f=a", "<c>"]}, "beginning of another"),
        ({"triggers": ["<x>"]}, r"structures\[0\]\.begin must begin with one of the triggers"),
        ({"triggers": ["<f=", "<c>", "<y>"]}, r"triggers\[2\] begins no structure"),
        ({"structures": [{"begin": 3}]}, r"structures\[0\]\.begin must be a string"),
        ({"structures": [{"begin": "<f=", "end": "", "schema": 3}]}, r"structures\[0\]\.schema"),
        ({"format": {}}, "format"),
        ({"structures": [{"begin": "<f=", "end": "", "schema": {"x-guidance": {}}}]}, "x-guidance"),
    ],
)
def test_what_is_wrong_is_said(grammars: Grammars, change: Any, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        grammars.matcher(StructuredOutputs(structural_tag=TAG | change))
