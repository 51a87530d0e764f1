"""Reasoning before a grammar, and its budget."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.chat.reasoning import Reasoning
from jaxspec.constraints.build import Constraints
from jaxspec.constraints.constraint import Constraint
from jaxspec.sampling_params import SamplingParams
from jaxspec.structured_outputs import StructuredOutputs

END_TAG = "</think>"
#: A token that would end the reasoning and begin the content at once.
TOKENIZER = ByteTokenizer(more=[b">7", b">\n", b"</think>"])
SEVEN, NEWLINE, TAG, STOP = 256, 257, 258, TOKENIZER.end_id
DIGITS = StructuredOutputs(regex="[0-9]{2}")


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    built = Constraints(as_tokenizer(TOKENIZER), TOKENIZER.vocab_size)
    yield built
    built.close()


def begun(constraints: Constraints, opened: bool, budget: int | None = None, free: bool = False) -> Constraint:
    params = SamplingParams(
        structured_outputs=None if free else DIGITS, thinking_token_budget=budget,
        reasoning=Reasoning("<think>", END_TAG, opened),
    )  # fmt: skip
    built = constraints.of(params, TOKENIZER.eos_token_ids)
    assert built is not None
    return built


def allowed(constraint: Constraint) -> set[int]:
    (mask,) = constraint.masks()
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
    return set(np.flatnonzero(bits).tolist())


def append(constraint: Constraint, text: str, *more: int) -> None:
    for token in [*text.encode(), *more]:
        assert token in allowed(constraint), (text, token)
        constraint.append(token)
        assert constraint.failure is None


NUMERALS = set(b"0123456789")


def test_the_grammar_begins_after_the_reasoning(constraints: Constraints) -> None:
    constraint = begun(constraints, opened=True)
    append(constraint, "12 <think> so ")
    assert STOP not in allowed(constraint)
    append(constraint, END_TAG)
    assert allowed(constraint) == NUMERALS
    append(constraint, "42")
    assert constraint.finished


@pytest.mark.parametrize(("token", "taken"), [(SEVEN, False), (NEWLINE, True), (ord(">"), True)])
def test_no_token_ends_the_reasoning_and_goes_on(constraints: Constraints, token: int, taken: bool) -> None:
    constraint = begun(constraints, opened=True)
    append(constraint, "so </think")
    assert (token in allowed(constraint)) == taken
    if taken:
        append(constraint, "", token)
        assert allowed(constraint) == NUMERALS
    append(begun(constraints, opened=True), "so ", SEVEN)


def test_reasoning_is_optional(constraints: Constraints) -> None:
    assert allowed(begun(constraints, opened=False)) == NUMERALS | {ord("<")}
    append(begun(constraints, opened=False), "42")
    constraint = begun(constraints, opened=False)
    append(constraint, "<think>any", TAG)
    assert allowed(constraint) == NUMERALS


def test_the_begin_of_the_tag_may_be_content(constraints: Constraints) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(regex="<t(ool|hink>|his)"), reasoning=Reasoning("<think>", END_TAG)
    )
    constraint = constraints.of(params, TOKENIZER.eos_token_ids)
    assert constraint is not None
    append(constraint, "<t")
    assert allowed(constraint) == set(b"oh")
    append(constraint, "his")
    assert constraint.finished


def test_the_budget_ends_the_reasoning(constraints: Constraints) -> None:
    constraint = begun(constraints, opened=True, budget=3)
    append(constraint, "abc")
    for token in END_TAG.encode():
        assert allowed(constraint) == {token}
        constraint.append(token)
    assert allowed(constraint) == NUMERALS


def test_a_budget_without_a_grammar(constraints: Constraints) -> None:
    constraint = begun(constraints, opened=True, budget=0, free=True)
    assert allowed(constraint) == {ord("<")}
    append(constraint, END_TAG)
    assert allowed(constraint) == set(range(TOKENIZER.vocab_size))
    append(constraint, "free <think>", STOP)
    constraint = begun(constraints, opened=False, budget=0, free=True)
    append(constraint, "no reasoning at all")


@pytest.mark.parametrize("before", ["\n", " \n", ""])
def test_a_budget_counts_after_blanks_and_merged_tokens(constraints: Constraints, before: str) -> None:
    constraint = begun(constraints, opened=False, budget=3, free=True)
    append(constraint, f"{before}<think", NEWLINE)
    append(constraint, "abc")
    assert allowed(constraint) == {ord("<")}
    append(constraint, END_TAG[:-1])
    constraint.append(SEVEN)  # instead of ">": goes on after the tag
    assert allowed(constraint) == set(range(TOKENIZER.vocab_size))
    append(constraint, "more than three")


def test_a_tree_leaves_the_state_as_it_was(constraints: Constraints) -> None:
    """The masks of a tree's nodes are those of the paths to them, one after the other."""
    paths = [b"", b"<", b"<t", b"<think>a", b"<think>a</think>", b"<think>a</think>4", b"4", b"42"]
    token, depth = [0], [0]
    for path in (b"<think>a</think>42", b"42", b"<t"):
        for d in range(len(path)):
            token.append(path[d])
            depth.append(d + 1)
    constraint = begun(constraints, opened=False)
    before = constraint.masks()
    masks = constraint.masks(token, depth)
    np.testing.assert_array_equal(constraint.masks(), before)
    shown: dict[bytes, np.ndarray] = {}
    current: list[int] = []
    for node, (t, d) in enumerate(zip(token, depth, strict=True)):
        current = [*current[: max(0, d - 1)], t] if d else []
        shown[bytes(current)] = masks[node]
    for path in paths:
        alone = begun(constraints, opened=False)
        for t in path:
            alone.append(t)
        np.testing.assert_array_equal(alone.masks()[0], shown[path])
