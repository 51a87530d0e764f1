"""The lines that are shown when an engine is ready."""

from __future__ import annotations

import pytest

from helpers import tiny


@pytest.mark.slow
def test_summary() -> None:
    with tiny.llm(
        draft=["truncated:1", "ngram"], page_size=16, kv_cache_tokens=64, max_num_seqs=2, max_num_batched_tokens=4,
        token_buckets=[4], compilation_cache_dir="", order="fcfs", predictor="none",
    ) as llm:  # fmt: skip
        found = dict(llm.engine.summary("configs/mine.yaml"))
    assert list(found) == ["model", "KV cache", "drafters", "length predictor", "preset"]
    assert found["model"].startswith("tiny, 0 million parameters, float32, ") and found["model"].endswith("64 tokens")
    assert found["KV cache"].startswith("64 tokens in 4 pages, 0.00 GiB")
    assert found["drafters"] == "truncated:1, ngram; tree: auto" and found["length predictor"] == "none"
    assert found["preset"].startswith("configs/mine.yaml; order: fcfs, ") and "at most 2 requests" in found["preset"]
