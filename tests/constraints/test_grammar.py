"""Grammars: random walks through the masks write what the structure asks for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (dict(json={"if": {"type": "string"}, "then": {}}), "if"),
        (dict(json={"type": "objekt"}), "structured_outputs.json is not possible.*objekt"),
        (dict(json={"const": 2**53 + 1}), "beyond 2"),
        (dict(json="{"), "structured_outputs.json is not JSON"),
        (dict(json="[1]"), "must be a schema"),
        (dict(regex="(a"), "structured_outputs.regex"),
        (dict(regex="(?=a)b"), "structured_outputs.regex"),
        (dict(grammar="start: missing"), "missing"),
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


@pytest.mark.parametrize(
    "outputs",
    [
        dict(regex="(a{1,1000}){1,1000}"),
        dict(regex="|".join(f"({'.*'.join('abcdefgh')}){{{n}}}" for n in range(1, 200))),
        dict(grammar="start: a a a\n" + "\n".join(f"{x}: {chr(ord(x) + 1)} {chr(ord(x) + 1)}" for x in "abcdefghi")
             + '\nj: "x" | j j'),
        dict(json={"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
        dict(json={"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b.*"} for n in range(60)]}),
    ],
)  # fmt: skip
def test_what_would_explode_is_refused_or_stays_small(outputs: dict[str, Any]) -> None:
    """Within seconds and a bounded amount of memory, whatever it is."""
    import resource

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
