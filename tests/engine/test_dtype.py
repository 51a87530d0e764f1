"""`dtype`: what auto stands for, and engines that serve in each data type."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp
import pytest

from helpers import tiny
from jaxspec import LLM, SamplingParams
from jaxspec.config import EngineConfig
from jaxspec.engine.startup import for_device
from jaxspec.models.decoder import Decoder, device_weights, forward

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, max_num_batched_tokens=32, token_buckets=[32], kv_cache_tokens=512, max_model_len=64,
    compilation_cache_dir="", compile_in_background=False,
)  # fmt: skip
PROMPTS = [[i, 2 * i, 7] for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(("backend", "resolved"), [("gpu", "bfloat16"), ("cpu", "float32"), ("tpu", "float32")])
def test_auto_is_bfloat16_on_gpus_only(monkeypatch: pytest.MonkeyPatch, backend: str, resolved: str) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert EngineConfig().dtype == "auto"
    budget = 2048 if backend == "gpu" else 256
    ahead = backend != "cpu"
    expected = EngineConfig(seed=3, dtype=resolved, max_num_batched_tokens=budget, async_scheduling=ahead)  # type: ignore[arg-type]
    assert for_device(EngineConfig(seed=3)) == for_device(expected) == expected
    for dtype in get_args(EngineConfig.model_fields["dtype"].annotation):
        assert dtype == "auto" or for_device(EngineConfig(dtype=dtype)).dtype == dtype


def test_auto_serves_float32_on_a_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), tiny.llm(**SIZES, draft=["ngram"]) as llm:
        assert llm.engine.config.dtype == "float32"
        assert "weights and KV of tiny are float32" in caplog.text
        assert tokens(llm) == [tiny.greedy(prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-8), ("bfloat16", 2**-5)])
def test_half_precision_serves_nearly_the_likeliest_tokens(dtype: str, error: float) -> None:
    """Compared with a float32 forward pass of the rounded weights. The weights given are on the device already."""
    model = tiny.model()
    weights: Any = {name: jnp.asarray(w, dtype) for name, w in model.weights.items()}
    with LLM(replace(model, weights=weights), **SIZES, dtype=dtype, draft=["ngram"]) as llm:
        served = tokens(llm)
        runner = llm.engine.loop.model_runner
        chex.assert_type([*runner._leaves, runner.kv_cache.keys], jnp.dtype(dtype))
    decoder = Decoder(model.config, device_weights(model.config, weights, "float32"))
    run = jax.jit(lambda text: forward(decoder, text))
    for prompt, answer in zip(PROMPTS, served, strict=True):
        assert len(answer) == GREEDY.max_tokens
        logits = run(jnp.asarray(prompt + answer))[len(prompt) - 1 : -1]
        chosen = jnp.take_along_axis(logits, jnp.asarray(answer)[:, None], 1)[:, 0]
        assert (logits.max(1) - chosen <= error * jnp.abs(logits).max(1)).all()
