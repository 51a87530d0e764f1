"""Against transformers on torch in float32 (tests/golden/record.py made the files): equal logits, equal tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.paths import GOLDEN
from jaxspec import LLM, SamplingParams
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.load import load_model

FAMILIES = ["llama", "llama3_rope", "linear_rope", "mistral", "qwen2", "qwen3"]
#: Where the two best logits are closer than this, two float32 implementations may disagree.
MARGIN = 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str) -> None:
    loaded, golden = load_model(str(GOLDEN / family)), np.load(GOLDEN / "logits.npz")
    decoder = Decoder(loaded.config, device_weights(loaded.config, loaded.weights, "float32"))
    logits = np.asarray(jax.jit(forward)(decoder, jnp.asarray(golden["tokens"])))
    np.testing.assert_allclose(logits, golden[family], atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_step_serves_every_family(family: str) -> None:
    """Windows, biases and norms go through the packed step too, in chunks of 8: its log-probabilities are theirs."""
    loaded, golden = load_model(str(GOLDEN / family)), np.load(GOLDEN / "logits.npz")
    tokens, logits = [int(t) for t in golden["tokens"]], golden[family].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    settings: dict[str, Any] = dict(page_size=16, kv_cache_tokens=256, max_num_seqs=8, max_num_batched_tokens=8)
    with LLM(loaded, token_buckets=[8], compilation_cache_dir="", **settings) as llm:
        out = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None
    for i, entry in enumerate(out.prompt_logprobs[1:], start=1):
        assert entry is not None and entry.logprob == pytest.approx(expected[i - 1, tokens[i]], abs=1e-4)
    assert out.outputs[0].token_ids == [int(logits[-1].argmax())]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2-135m", max_model_len=512, token_buckets=[1, 8, 64], max_num_batched_tokens=64) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_smollm2_writes_the_same_tokens(smollm2: LLM, together: bool) -> None:
    cases = json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))
    prompts = [case["prompt_ids"] for case in cases]
    for case in cases:
        text = smollm2.tokenizer.apply_chat_template(case["messages"])
        assert smollm2.tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"]
    params = SamplingParams(temperature=0, max_tokens=len(cases[0]["output_ids"]), ignore_eos=True)
    groups = [prompts] if together else [[p] for p in prompts]
    outputs = [o.outputs[0].token_ids for group in groups for o in smollm2.generate(group, params)]
    for case, output in zip(cases, outputs, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(output, case["output_ids"], strict=True)) if a != b]
        assert not differ or case["margins"][differ[0]] < MARGIN, f"token {differ[0]} differs"
