"""Grammars: random walks through the masks write what the structure asks for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec import InvalidRequest, StructuredOutputs
from jaxspec.constraints.grammar import Grammars
from jaxspec.structured_outputs import MAX_CHARACTERS

TOKENIZER = as_tokenizer(ByteTokenizer([b"true", b"false", b'":', b'{"', b"\xc3\xa4"]))
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size)


@pytest.fixture(autouse=True, scope="module")
def end_the_trial() -> Iterator[None]:
    yield
    GRAMMARS.close()


def write(outputs: StructuredOutputs, seed: int, most: int = 400) -> tuple[str, bool]:
    """A random text of the grammar, and whether it is complete. Likes to end and to close."""
    matcher, rng, tokens = GRAMMARS.matcher(outputs), np.random.default_rng(seed), []
    mask = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
    while not matcher.finished and len(tokens) < most:
        matcher.fill(mask)
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask[i // 32] >> np.uint32(i % 32) & 1]
        assert allowed
        liked = [i for i in allowed if i in (*b'"}]', TOKENIZER.eos_token_ids[0])]
        pick = int(rng.choice(liked if liked and rng.random() < 0.6 else allowed))
        assert matcher.consume(pick)
        tokens.append(pick)
    return TOKENIZER.decode(tokens), matcher.finished


@pytest.mark.parametrize("seed", range(5))
def test_forms(seed: int) -> None:
    assert write(StructuredOutputs(choice=["yes", 'no "way"', "né"]), seed)[0] in ("yes", 'no "way"', "né")
    text, done = write(StructuredOutputs(regex=r"[a-c]{2,4}-\d\d"), seed)
    assert done and 5 <= len(text) <= 7
    assert write(StructuredOutputs(grammar='start: "a" start | "b"'), seed)[0].strip("a") in ("b", "")
    assert write(StructuredOutputs(grammar='root ::= "x" ("y" | "z")'), seed)[0] in ("xy", "xz")
    text, done = write(StructuredOutputs(json_object=True), seed)
    assert not done or isinstance(json.loads(text), dict)


_INTEGERS = st.integers(-(2**50), 2**50)
_NAMES = st.text("abcdefg", min_size=1, max_size=5)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "string"}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-50, 50),
              st.integers(0, 30)),
    st.builds(lambda words: {"enum": words}, st.lists(st.one_of(_NAMES, _INTEGERS, st.none()), min_size=1,
              max_size=4)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(lambda value: {"const": value}, st.one_of(_NAMES, _INTEGERS, st.booleans())),
    st.just({"type": "string", "pattern": "^[A-Z]{2}[0-9]$"}),
)  # fmt: skip


def _object(fields: dict[str, Any], optional: bool) -> dict[str, Any]:
    required = list(fields)[:1] if optional else list(fields)
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


#: Schemas of objects, arrays and alternatives.
SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(_NAMES, inner, max_size=4), st.booleans()),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_what_a_schema_allows_validates(count: int) -> None:
    complete = []

    @settings(
        max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(schema=SCHEMAS, seed=st.integers(0, 2**32))
    def check(schema: dict[str, Any], seed: int) -> None:
        text, done = write(StructuredOutputs(json=schema), seed)
        complete.append(done)
        if done:
            jsonschema.validate(json.loads(text), schema)

    check()
    assert sum(complete) > 0.7 * len(complete)


#: Schemas that cannot be honoured, by what the error says.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "if": {"if": {"minLength": 1}, "then": {"maxLength": 2}}, "then": {"then": {}}, "else": {"else": {}},
    "not": {"not": {"type": "string"}}, "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False}, "propertyNames": {"propertyNames": {"maxLength": 2}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}}, "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "dependencies": {"dependencies": {"a": ["b"]}}, "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"contains": {}}, "minContains": {"minContains": 2}, "maxContains": {"maxContains": 2},
    "$dynamicRef": {"$dynamicRef": "#a"}, "oneOf": {"oneOf": [{"minLength": 1}, {"maxLength": 4}]},
    "format": {"type": "string", "format": "regex"}, "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "backreferences": {"type": "string", "pattern": r"(a)\1"}, "retrieving it": {"$ref": "https://example.com/a.json"},
    "maxProperties": {"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "x-guidance": {"x-guidance": {}},
    "minProperties is 3": {"required": ["a"], "minProperties": 3},
}  # fmt: skip


@pytest.mark.parametrize("said", UNSUPPORTED)
@pytest.mark.parametrize("within", [False, True])
def test_what_cannot_be_honoured_in_a_schema_is_named(said: str, within: bool) -> None:
    schema: dict[str, Any] = UNSUPPORTED[said]
    if within and said != "x-guidance":  # there it is an unknown keyword, which constrains nothing
        schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/d"}}, "$defs": {"d": schema}}
    with pytest.raises(InvalidRequest, match=f"structured_outputs.json is not possible: .*{re.escape(said)}") as found:
        GRAMMARS.matcher(StructuredOutputs(json=schema))
    assert found.value.field == "structured_outputs"


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (True, "[3]", True),
        ({"properties": {"a": INTEGER}}, '{"a": 1, "b": "x"}', True),
        ({"properties": {"a": INTEGER}}, r'{"a": 1, "\u0061": "x"}', False),  # the same key again
        ({"patternProperties": {"^a": INTEGER}}, r'{"\u0061b": "x"}', False),
        ({"properties": {"a\t": INTEGER}}, r'{"a\t": "x"}', False),
        ({"required": ["a"], "minProperties": 2}, '{"a": 1}', False),
        ({"required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', True),
        ({"properties": {"minProperties": {"minimum": 9}}}, '{"minProperties": 9}', True),
        ({"minLength": 2}, r'"\ud83d\ude00"', False),
        ({"minLength": 2, "maxLength": 2}, '"é🦉"', True),
        ({"pattern": "b"}, '"abc"', True),
        ({"enum": ["a", 5], "minimum": 6}, "5", False),
        ({"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": {"type": "string"}}}, '"ab"', False),
    ],
)
def test_what_a_schema_admits(schema: Any, text: str, fits: bool) -> None:
    matcher = GRAMMARS.matcher(StructuredOutputs(json=schema))
    written = all(matcher.consume(token) for token in text.encode())
    assert (written and (matcher.finished or matcher.consume(TOKENIZER.eos_token_ids[0]))) == fits


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (dict(json={"type": "objekt"}), "structured_outputs.json is not possible.*objekt"),
        (dict(json={"const": 2**53 + 1}), "beyond 2"),
        (dict(json=False), "false allows nothing"),
        (dict(json={"enum": ["\x01"]}), "control character"),
        (dict(json={"$ref": "#"}), "no text matches it"),
        (dict(json={"const": {1}}), "set is not JSON"),
        (dict(json="{"), "structured_outputs.json is not JSON"),
        (dict(json="[1]"), "must be a schema"),
        (dict(regex="(a"), "structured_outputs.regex"),
        (dict(regex="(?=a)b"), "structured_outputs.regex"),
        (dict(grammar="start: missing"), "missing"),
        (dict(choice=[str(i) for i in range(100_000)]), "at most 100000 characters"),
        (dict(choice=[]), "choice must be a list of non-empty strings"),
        (dict(choice=["a", ""]), "choice must be a list of non-empty strings"),
        (dict(json_object=False), "must be true"),
        (dict(), "exactly one of json, regex"),
        (dict(regex="a", choice=["b"]), "this one has regex and choice"),
        (dict(regex="a" * (MAX_CHARACTERS + 1)), "at most 100000 characters"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_named(outputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as found:
        GRAMMARS.matcher(StructuredOutputs(**outputs))
    assert found.value.field == "structured_outputs"


def layers(count: int, layer: Callable[[dict[str, Any]], dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    """`count` definitions, each made of a reference to the next one."""
    defs = {f"d{i}": layer({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": last}}


EXPLOSIVE: dict[str, dict[str, Any]] = {
    "counted repetitions": dict(regex="(a{1,1000}){1,1000}"),
    "three counted repetitions": dict(regex="((a{1,100}){1,100}){1,100}"),
    "optional repetitions": dict(regex="(a?){2000}a{2000}"),
    "exponential automaton": dict(regex="[ab]*a[ab]{25}"),
    "large classes": dict(regex=r"(\p{L}\P{Lu}){1000}"),
    "deep regex": dict(regex="(" * 20_000 + "a" + ")" * 20_000),
    "alternatives": dict(regex="|".join(f"({'.*'.join('abcdefgh')}){{{n}}}" for n in range(1, 200))),
    "doubling rules": dict(
        grammar="start: a a a\n" + "\n".join(f"{x}: {chr(ord(x) + 1)} {chr(ord(x) + 1)}" for x in "abcdefghi")
        + '\nj: "x" | j j'
    ),
    "empty rules": dict(grammar='start: x x x x x x x x\nx: y y y y y y |\ny: z z z z z z |\nz: "a" |'),
    "ambiguous rules": dict(grammar='start: start start | start start start | "a"'),
    "repeated rules": dict(grammar='start: (("a" | "b"){1,1000}){1,1000}'),
    "deep rules": dict(grammar="root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "large enum": dict(json={"enum": [f"v{i}" for i in range(9000)]}),
    "many choices": dict(choice=[f"c{i}" for i in range(9000)]),
    "many properties": dict(json={"properties": {f"p{i}": {"type": "null"} for i in range(2500)}}),
    "many items": dict(json={"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
    "long strings": dict(json={"type": "string", "minLength": 10**8, "maxLength": 10**9}),
    "intersections": dict(
        json={"allOf": [{"anyOf": [{"type": "string", "pattern": f"{c}{i}"} for c in "abcd"]} for i in range(12)]}
    ),
    "deep schema": dict(json='{"items":' * 9000 + "{}" + "}" * 9000),
    "deep definitions": dict(json=layers(1200, lambda ref: {"type": "array", "items": ref}, {"type": "null"})),
    "doubling allOf": dict(json=layers(30, lambda ref: {"allOf": [ref, ref]}, {"type": "string"})),
    "doubling anyOf": dict(json=layers(30, lambda ref: {"anyOf": [ref, ref]}, {"type": "string"})),
    "doubling properties": dict(
        json=layers(30, lambda ref: {"properties": {"a": ref, "b": ref}, "required": ["a", "b"]}, {"type": "null"})
    ),
}  # fmt: skip
#: The trial needs its 5 s for each.
ENDLESS: dict[str, dict[str, Any]] = {
    "patterns": dict(json={"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b.*"} for n in range(60)]}),
    "large divisor": dict(json={"type": "integer", "multipleOf": 9999991}),
    "many patternProperties": dict(
        json={"patternProperties": {f"^{chr(97 + i % 26)}{i}[a-z]*x?$": {"type": "null"} for i in range(800)}}
    ),
}


@pytest.mark.parametrize("kind", [*EXPLOSIVE, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ENDLESS)])
def test_what_would_explode_is_refused_or_stays_small(kind: str) -> None:
    """Within seconds and a bounded amount of memory, whatever it is."""
    import resource

    outputs = (EXPLOSIVE | ENDLESS)[kind]
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with suppress(InvalidRequest, RuntimeError):
        matcher = GRAMMARS.matcher(StructuredOutputs(**outputs))
        mask = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
        for _ in range(50):
            matcher.fill(mask)
            first = next((i for i in range(256) if mask[i // 32] >> np.uint32(i % 32) & 1), None)
            if first is None or not matcher.consume(first):
                break
    assert time.process_time() - begun < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB


def test_deep_definitions_are_possible_as_far_as_a_thread_has_stack() -> None:
    nested = lambda depth: layers(depth, lambda ref: {"type": "array", "items": ref}, {"type": "null"})  # noqa: E731
    GRAMMARS.matcher(StructuredOutputs(json=nested(60)))
    with pytest.raises(InvalidRequest, match="too much time or memory"):  # 8 MiB, the main thread's, would do
        GRAMMARS.matcher(StructuredOutputs(json=nested(500)))


def test_a_grammar_that_runs_into_a_limit_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a whole answer, and the answer for a complete one."""
    from llguidance import LLParserLimits

    monkeypatch.setattr("jaxspec.constraints.grammar.limits", lambda: LLParserLimits(max_items_in_row=100))
    grammars = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    try:
        matcher = grammars.matcher(
            StructuredOutputs(json={"properties": {f"p{i}": {"type": "integer"} for i in range(200)}})
        )
        with pytest.raises(RuntimeError, match="cannot go on"):
            matcher.consume(ord("{"))
        assert not matcher.finished
        with pytest.raises(RuntimeError, match="cannot go on"):
            matcher.fill(np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32))
    finally:
        grammars.close()


def test_hundreds_of_optional_keys() -> None:
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(500)}, "additionalProperties": False}
    text, done = write(StructuredOutputs(json=schema), 1)
    assert not done or jsonschema.validate(json.loads(text), schema) is None


def test_a_grammar_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an ambiguous one, each token takes longer than the one before: this one a second for the 150th."""
    monkeypatch.setattr("jaxspec.constraints.grammar.SECONDS", 0.02)
    monkeypatch.setattr("jaxspec.constraints.grammar.TOKEN_SECONDS", 0.0001)
    matcher = GRAMMARS.matcher(StructuredOutputs(grammar='start: a~1..1000\na: b~1..1000\nb: "c"'))

    def write_on() -> None:
        for _ in range(200):
            assert matcher.consume(ord("c"))

    with pytest.raises(RuntimeError, match="too much time"):
        write_on()
    assert not matcher.finished


def test_drafts_that_are_taken_back_earn_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxspec.constraints.grammar.SECONDS", 0.05)
    matcher = GRAMMARS.matcher(StructuredOutputs(regex="a*"))

    def go_on() -> None:
        for _ in range(10**6):
            matcher.consume(ord("a"))
            matcher.rollback(1)

    with pytest.raises(RuntimeError, match="too much time"):
        go_on()
