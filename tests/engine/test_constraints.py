"""Constrained requests in the engine: what they write, with and without drafts, alone and in a crowd."""

from __future__ import annotations

import json
import pickle
from queue import Queue
from typing import Any

import pytest

from helpers import tiny
from helpers.generation import check_clean, tokens_of
from helpers.patience import PATIENCE
from jaxspec import LLM, InvalidRequest, SamplingParams, StructuredOutputs

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[4, 32], max_num_batched_tokens=32, max_model_len=128,
    compilation_cache_dir="", kv_cache_tokens=1024,
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
END = 256
#: (params, what must hold of text and tokens)
CASES: list[tuple[dict[str, Any], Any]] = [
    (dict(structured_outputs=StructuredOutputs(json=SCHEMA)), lambda text, ids: json.loads(text)["b"] in ("x", "yy")),
    (dict(structured_outputs=StructuredOutputs(regex="(ab){3,5}c")), lambda text, ids: text.strip("ab") == "c"),
    (dict(structured_outputs=StructuredOutputs(choice=["left", "right"])), lambda text, ids: text in ("left", "right")),
    (dict(min_tokens=20, ignore_eos=False), lambda text, ids: len(ids) >= 20),
    (dict(allowed_token_ids=[65, 66]), lambda text, ids: set(ids) <= {65, 66}),
    (dict(bad_words=["e", "th"]), lambda text, ids: "e" not in text and "th" not in text),
    (dict(), lambda text, ids: len(ids) > 0),
]


def params(case: int, temperature: float) -> SamplingParams:
    more: dict[str, Any] = {"ignore_eos": True} | CASES[case][0]
    return SamplingParams(temperature=temperature, seed=case, max_tokens=60, **more)


def texts(llm: LLM) -> list[Any]:
    given = [params(case, t) for case in range(len(CASES)) for t in (0.0, 1.0)]
    outputs = llm.generate([[7 * i % 250, 3, 9] for i in range(len(given))], given)
    check_clean(llm)
    for i, out in enumerate(outputs):
        if i < 2 and out.outputs[0].finish_reason == "length":
            continue  # whitespace until it was cut
        assert CASES[i // 2][1](out.outputs[0].text, out.outputs[0].token_ids), (i // 2, out.outputs[0].text)
    return [tokens_of(out) for out in outputs]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with tiny.llm(draft=[], **SIZES) as llm:
        found = texts(llm)
        given = [params(case, t) for case in range(len(CASES)) for t in (0.0, 1.0)]
        alone = [tokens_of(llm.generate([[7 * i % 250, 3, 9]], [p])[0]) for i, p in enumerate(given)]
        assert alone == found and llm.engine.stats().compilations_after_warmup == 0
        return found


@pytest.mark.parametrize(
    "settings",
    [
        dict(draft=["truncated:1", "ngram"], tree="fixed"),
        dict(draft=["grammar"], tree="chain"),
        pytest.param(dict(draft=["truncated:1"], tree="global_greedy"), marks=pytest.mark.slow),
        pytest.param(dict(draft=["ngram"], kernels="xla"), marks=pytest.mark.slow),
        pytest.param(
            dict(draft=["truncated:1"], tree="chain", order="las", memory="swap", kv_cache_tokens=160),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_drafts_change_nothing(settings: dict[str, Any], plain: list[Any]) -> None:
    with tiny.llm(**SIZES | settings) as llm:
        assert texts(llm) == plain
        if settings.get("tree") in ("chain", "fixed"):  # the others draft only where measured times say that it pays
            assert llm.engine.stats().draft_tokens > 0
        assert llm.engine.stats().compilations_after_warmup == 0


@pytest.mark.slow
def test_rejection_sampling_keeps_to_the_grammar() -> None:
    with tiny.llm(draft=["truncated:1"], acceptance="rejection", tree="chain", **SIZES) as llm:
        texts(llm)
        assert llm.engine.stats().draft_tokens > 0


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, mask: Any) -> None:
        raise RuntimeError("too complex")

    with tiny.llm(draft=[], **SIZES) as llm:
        bound = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="a+"))
        with monkeypatch.context() as patched:
            patched.setattr("jaxspec.constraints.grammar.GrammarMatcher.fill", fill)
            with pytest.raises(RuntimeError, match="too complex"):
                llm.generate([[1, 2, 3]], bound)
        assert llm.generate([[1, 2, 3]], bound)[0].outputs[0].text.strip("a") == ""
        check_clean(llm)


def test_a_grammar_that_takes_too_much_work_is_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last delta is refused as the request would have been, and the engine serves others."""
    from llguidance import LLParserLimits

    monkeypatch.setattr("jaxspec.constraints.grammar.limits", lambda: LLParserLimits(max_items_in_row=100))
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(200)}}
    last: Queue[Any] = Queue()
    with tiny.llm(**SIZES) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, structured_outputs=StructuredOutputs(json=schema))
        llm.engine.submit([1, 2, 3], params, lambda delta: last.put(delta) if delta.finish_reason else None)
        delta = last.get(timeout=PATIENCE)
        assert delta.finish_reason == "error"
        assert isinstance(delta.refused, InvalidRequest) and delta.refused.field == "structured_outputs"
        assert (pickle.loads(pickle.dumps(delta.refused)).field, str(delta.refused)) == (
            "structured_outputs",
            str(delta.refused),
        )
        assert tokens_of(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))[0])
        check_clean(llm)
