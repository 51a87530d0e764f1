"""On the CPU kernels a token's logits have the same bits in any batch, chunk and token tree."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from helpers import tiny
from helpers.generation import check_clean
from jaxspec import LLM, SamplingParams
from jaxspec.outputs import TokenLogprob

SIZES: dict[str, Any] = dict(
    page_size=16, max_model_len=400, kv_cache_tokens=2048, compilation_cache_dir="", kernels="native",
    compile_in_background=False,
)  # fmt: skip
PROMPTS = [[(7 * i + j) % 256 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 90, 250, 300, 31))]
SCORED = [
    SamplingParams(
        temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2 * (i % 3)
    )
    for i in range(len(PROMPTS))
]


def answers(llm: LLM, together: int) -> list[tuple[tuple[TokenLogprob, ...], Any]]:
    """Logits of each output and prompt, `together` prompts at a time."""
    out = []
    for i in range(0, len(PROMPTS), together):
        out += llm.generate(PROMPTS[i : i + together], SCORED[i : i + together])
    check_clean(llm)
    return [(o.outputs[0].logprobs, o.prompt_logprobs) for o in out]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_bits_do_not_depend_on_the_batch(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        jax.nn, "log_softmax", lambda x, axis: x
    )  # which XLA sums in an order that depends on the batch
    model = tiny.model(window)
    with LLM(model, draft=[], max_num_seqs=1, max_num_batched_tokens=64, token_buckets=[1], **SIZES) as llm:
        alone = answers(llm, 1)
    busy: dict[str, Any] = dict(max_num_seqs=8, max_num_batched_tokens=48, draft_calibration=False)
    for tree, sizes in (("fixed", [1, 4, 12, 32]), ("global_greedy", [2, 8, 16, 24])):
        settings = dict(draft=["truncated:1", "ngram"], tree=tree, token_buckets=sizes)
        with LLM(model, **settings, **busy, **SIZES) as llm:
            for together in (1, 3, 8):
                assert answers(llm, together) == alone
            assert llm.engine.stats().draft_tokens > 0
