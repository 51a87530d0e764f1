"""Many JSON schemas at once in the tiny engine: complete answers validate, and drafts change no token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from helpers import tiny
from helpers.generation import check_clean, tokens_of
from helpers.schemas import schemas
from jaxspec import LLM, SamplingParams, StructuredOutputs
from jaxspec.outputs import RequestOutput

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=32, token_buckets=[128], max_num_batched_tokens=128, max_model_len=400,
    compilation_cache_dir="", kv_cache_tokens=32 * 400,
)  # fmt: skip
#: The other formats need packages. `date` has 29 February in every year.
FORMATS = FormatChecker(["ipv4", "ipv6", "uuid", "email"])


def answers(llm: LLM, count: int) -> list[RequestOutput]:
    """Greedy answers to the even ones of `count` schemas, seeded random ones to the odd."""
    given = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=300, structured_outputs=StructuredOutputs(json=schema))
        for i, schema in enumerate(schemas(count))
    ]
    outputs = llm.generate([[7 * i % 250, 3, 9] for i in range(count)], given)
    check_clean(llm)
    assert llm.engine.stats().compilations_after_warmup == 0
    return outputs


@pytest.mark.parametrize(
    ("count", "drafts"),
    [
        (30, dict(draft=["ngram"], tree="fixed")),
        pytest.param(200, dict(draft=["ngram"], tree="fixed"), marks=pytest.mark.slow),
        pytest.param(
            120, dict(draft=["truncated:1", "ngram"], tree="fixed", draft_choice="epsilon_greedy"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_complete_answers_validate_and_drafts_change_nothing(count: int, drafts: dict[str, Any]) -> None:
    with tiny.llm(draft=[], **SIZES) as llm:
        plain = answers(llm, count)
    with tiny.llm(**SIZES, **drafts) as llm:
        assert [tokens_of(out) for out in answers(llm, count)] == [tokens_of(out) for out in plain]
        assert llm.engine.stats().accepted_tokens > count
    complete = 0
    for schema, out in zip(schemas(count), plain, strict=True):
        if out.outputs[0].finish_reason == "stop":
            complete += 1
            Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(out.outputs[0].text))
    assert complete > 0.85 * count  # 94 % of 500


def test_the_schemas_are_valid_and_differ() -> None:
    found = schemas(500)
    assert found == schemas(500) and found != schemas(500, seed=1)
    assert len({json.dumps(schema) for schema in found}) > 400
    for schema in found:
        Draft202012Validator.check_schema(schema)
