"""Grammar drafting: the tokens that a structured output forces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.chat.reasoning import Reasoning
from jaxspec.constraints.build import Constraints
from jaxspec.constraints.constraint import Constraint
from jaxspec.draft.grammar import GrammarDrafter
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.structured_outputs import StructuredOutputs

TOKENIZER = ByteTokenizer()
INTEGERS = {key: {"type": "integer"} for key in "abc"}
THREE: dict[str, Any] = {"type": "object", "properties": INTEGERS, "required": [*INTEGERS]}
NESTED: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"enum": [True]}}}
COLOURS = StructuredOutputs(regex=r'\{"colour": ("red"|"green"), "size": [0-9]\}')


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    built = Constraints(as_tokenizer(TOKENIZER), TOKENIZER.vocab_size)
    yield built
    built.close()


def begun(constraints: Constraints, text: str = "", **params: object) -> Constraint:
    built = constraints.of(SamplingParams(**params), TOKENIZER.eos_token_ids)  # type: ignore[arg-type]
    assert built is not None
    for token in text.encode():
        built.append(token)
    return built


def forced(constraint: Constraint) -> str:
    return bytes(token for token, _ in constraint.forced(99)).decode()


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("", '{"colour": "'),
        ('{"co', 'lour": "'),
        ('{"colour": "g', 'reen", "size": '),
        ('{"colour": "red", "size": ', ""),
    ],
)
def test_what_a_grammar_forces(constraints: Constraints, text: str, rest: str) -> None:
    assert forced(begun(constraints, text, structured_outputs=COLOURS)) == rest


def test_nothing_is_forced_after_the_end_or_without_a_grammar(constraints: Constraints) -> None:
    ended = begun(constraints, '{"colour": "red", "size": 1}', structured_outputs=COLOURS)
    ended.append(TOKENIZER.end_id)
    assert ended.finished and forced(ended) == ""
    assert forced(begun(constraints, min_tokens=3)) == ""


def test_reasoning_forces_its_end_when_the_budget_is_spent(constraints: Constraints) -> None:
    form = Reasoning("<think>", "</think>", True)
    params = dict(structured_outputs=COLOURS, reasoning=form, thinking_token_budget=4)
    assert forced(begun(constraints, "hm,", **params)) == ""
    assert forced(begun(constraints, "hm, ", **params)) == '</think>{"colour": "'
    assert forced(begun(constraints, "hm, </th", **params)) == 'ink>{"colour": "'
    assert forced(begun(constraints, "hm, </think>", **params)) == '{"colour": "'


def test_a_chain_of_what_is_forced_is_proposed(constraints: Constraints) -> None:
    requests = [Request(str(i), 1, [5], 99, 0.0) for i in range(3)]
    for request, text in zip(requests[1:], ("", '{"colour": "'), strict=True):
        request.forced = begun(constraints, text, structured_outputs=COLOURS).forced
    drafter = GrammarDrafter("grammar")
    scheduled = [ScheduledRequest(r, 0, 1, 4, 4) for r in requests]
    plain, first, second = drafter.propose(scheduled, lambda _: None, 4, 1)()
    assert plain is None and second is None and first is not None
    assert bytes(first.token.tolist()) == b'{"co' and first.parent.tolist() == [-1, 0, 1, 2]
    assert first.logprob.tolist() == [0.0] * 4 and first.logprob.dtype == np.float32


def test_suffix_drafting_goes_on_where_the_grammar_leaves_a_choice(constraints: Constraints) -> None:
    said = '{"colour": "red", "size": 1} {"colour": "'
    request = Request("a", 1, [5, *said.encode()], 99, 0.0)
    request.forced = begun(constraints, '{"colour": "', structured_outputs=COLOURS).forced
    (found,) = GrammarDrafter("grammar", SuffixDrafter("ngram")).propose(
        [ScheduledRequest(request, 0, 1, 20, 20)], lambda _: None, 20, 1
    )()
    assert found is not None and bytes(found.token.tolist()) == b'red", "size": 1}'
    guessed = np.diff(found.logprob, prepend=0.0) < 0  # "r" and "1"; the rest is forced
    assert np.flatnonzero(guessed).tolist() == [0, 14]
    assert request.forced(3, lambda path: (ord("x"), 0.5)) == []  # a guess that the grammar forbids


@pytest.mark.parametrize(
    ("schema", "text", "rest"),
    [
        (THREE, '{"a":1,', ""),  # nothing has followed a comma yet
        (THREE, '{"a":1,\n"b":2,', '\n"c":'),  # the newline is guessed, the rest is forced
        (THREE, '{"a":1,"b":2,', '"c":'),  # nothing else than the quote has followed
        (NESTED, "[[true,\n true],", ""),  # what followed the comma did so in another depth
        (NESTED, "[[true,\n true,", "\n "),  # "t" followed the space
        (NESTED, "[\n[true,true],\n[true,true],", "\n["),
    ],
)
def test_the_layout_goes_on_as_before(constraints: Constraints, schema: dict[str, Any], text: str, rest: str) -> None:
    assert forced(begun(constraints, text, structured_outputs=StructuredOutputs(json=schema))) == rest


def test_a_guess_that_agrees_with_the_layout_is_surer(constraints: Constraints) -> None:
    constraint = begun(constraints, '{"a":1,\n"b":2,', structured_outputs=StructuredOutputs(json=THREE))
    chance = {text: constraint.forced(1, lambda path, text=text: (ord(text), 0.3)) for text in "\n x"}
    assert chance == {"\n": [(10, 0.85)], " ": [(32, 0.3)], "x": [(10, 0.85)]}
