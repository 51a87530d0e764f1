"""bfloat16 KV under a float32 model: tokens are those of plain decoding with such KV."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import tiny
from helpers.generation import check_clean, tokens_of
from jaxspec import SamplingParams
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine import startup
from jaxspec.step.kv_cache import KVCache

COMMON: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[4, 16], max_num_batched_tokens=16, max_model_len=96,
    compilation_cache_dir="", kv_cache_tokens=160, kv_cache_dtype="bfloat16",
)  # fmt: skip
TEXTS = [list(range(i, i + 5)) * 5 for i in range(0, 60, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "native"])
def test_tokens_of_plain_decoding(kernels: str) -> None:
    """Drafts, chunks, a full batch and swapped pages change no token, greedy or sampled."""
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(6)]
    with tiny.llm(draft=[], kernels=kernels, **COMMON) as llm:
        plain = [tokens_of(llm.generate([text], one)[0]) for text, one in zip(TEXTS, params, strict=True)]
    busy = dict(draft=["ngram"], memory="swap", order="las", las={"quantum_ms": 1})
    with tiny.llm(kernels=kernels, **busy, **COMMON) as llm:
        assert [tokens_of(out) for out in llm.generate(TEXTS, params)] == plain
        stats = llm.engine.stats()
        assert stats.pages_swapped_in > 0 and stats.compilations_after_warmup == 0
        check_clean(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "native"])
def test_numbers_are_rounded_once_and_close_to_float32(kernels: str) -> None:
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for kind in ("auto", "bfloat16"):
        with tiny.llm(draft=[], kernels=kernels, **COMMON | {"kv_cache_dtype": kind}) as llm:
            (out,) = llm.generate(TEXTS[:1], scored)
            found.append([p.logprob for p in out.prompt_logprobs or [] if p])
    off = np.abs(np.subtract(*found))
    assert 0 < off.mean() < 0.15


def test_stored_is_what_the_pool_holds() -> None:
    """The rounding that attention sees equals the conversion, also when XLA optimises it."""
    x = jax.random.normal(jax.random.key(0), (1000,))
    pool = KVCache.zeros(tiny.config(), 1, 16, "bfloat16")
    np.testing.assert_array_equal(jax.jit(pool.stored)(x), x.astype(jnp.bfloat16).astype(jnp.float32))
    assert KVCache.zeros(tiny.config(), 1, 16, "float32").stored(x) is x


def test_a_gpu_needs_a_bfloat16_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "claim_memory", lambda _: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert startup.for_device(EngineConfig(kv_cache_dtype="bfloat16")).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="kv_cache_dtype: bfloat16 with dtype: float32"):
        startup.for_device(EngineConfig(kv_cache_dtype="bfloat16", dtype="float32"))
