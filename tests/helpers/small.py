"""Settings of an engine small enough for a test."""

from __future__ import annotations

SMALL = (
    "compilation_cache_dir=", "kv_cache_tokens=2048", "max_model_len=128", "max_num_batched_tokens=16", "page_size=16",
    "max_num_seqs=4", "token_buckets=[16]", "enable_prefix_caching=false",
)  # fmt: skip
