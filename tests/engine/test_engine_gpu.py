"""The whole engine with the layers of GPUs; their attention kernel is interpreted."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import tiny
from helpers.generation import check_clean, tokens_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.step.gpu import GpuLayers

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [7, 9, 11, 7, 9, 11, 7, 9], list(range(40))]
CASES: dict[str, dict[str, Any]] = {
    "plain": dict(draft=[]),
    "drafts": dict(draft=["ngram", "truncated:1"], tree="fixed", draft_depth=2),
    "small pool": dict(draft=[], kv_cache_tokens=80, max_model_len=64),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_a_plain_forward_pass(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """In float32, token for token: batched, chunked, with drafts, after preemption. Pages come back."""
    monkeypatch.setattr("jaxspec.step.runner.pick_layers", lambda config, model: GpuLayers(interpret=True))
    sizes = dict(page_size=16, max_num_seqs=3, max_num_batched_tokens=32, token_buckets=[16], max_model_len=96)
    settings = sizes | dict(kv_cache_tokens=512, compilation_cache_dir="", enable_prefix_caching=False) | CASES[case]
    expected = [tiny.greedy(prompt, 20) for prompt in PROMPTS]
    with tiny.llm(**settings) as llm:
        assert llm.engine.loop.model_runner.layers.name == "gpu"
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert [tokens_of(output) for output in outputs] == expected
        stats = llm.engine.stats()
        assert (stats.draft_tokens > 0) == (case == "drafts")
        assert (stats.preemptions > 0) == (case == "small pool")
        assert stats.compilations_after_warmup == 0
        check_clean(llm)
