"""The sampling parameters that a model's authors recommend: checked at the start, for requests that set none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers import tiny
from jaxspec import LLM, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.engine.default_sampling import with_defaults
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import LoadedModel

MODEL = {"temperature": 0.6, "top_k": 20, "max_tokens": 2048}
SMALL: dict[str, Any] = dict(
    draft=(), page_size=16, kv_cache_tokens=256, max_num_seqs=2, max_num_batched_tokens=8, token_buckets=[8],
    compilation_cache_dir="",
)  # fmt: skip


def model(**sampling: Any) -> LoadedModel:
    return replace(tiny.model(), sampling=sampling)


def test_the_setting() -> None:
    assert with_defaults(model(**MODEL), "auto").sampling == MODEL
    assert with_defaults(model(**MODEL), "none").sampling == {}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", "hot", "must be a number, got 'hot'"),
        ("temperature", -1, "between 0 and 100, got -1"),
        ("top_p", 0.0, r"in \(0, 1\], got 0.0"),
        ("top_k", 2.5, "must be a number"),
        ("top_k", True, "must be a number"),
        ("max_tokens", 0, "at least 1"),
    ],
)
def test_invalid_values_are_named(name: str, value: Any, rule: str) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"generation_config.json of tiny: {name} .*{rule}.*generation_config: none"
    ):
        with_defaults(model(**{name: value}), "auto")
    with_defaults(model(**{name: value}), "none")


def test_the_engine_checks_them_before_it_compiles() -> None:
    with pytest.raises(ModelLoadError, match="temperature"):
        Engine(EngineConfig.load(None, **SMALL), model=model(temperature=-1.0))


def test_offline() -> None:
    with LLM(model(**MODEL), **SMALL) as llm:
        assert llm.engine.default_sampling == MODEL
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=2048)
        params = llm.get_default_sampling_params(max_tokens=4, temperature=0)
        assert params == SamplingParams(temperature=0, top_k=20, max_tokens=4)
        greedy = llm.generate("ab")[0].outputs[0].token_ids
        assert greedy == llm.generate("ab", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].token_ids
