"""Speculation on the real model: the same tokens as without, greedy and sampled."""

from __future__ import annotations

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.bench.prompts import PROMPTS

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=128, ignore_eos=True, seed=11)


def answers(**settings: object) -> tuple[list[list[int]], int]:
    """Tokens for sixteen prompts, half of them greedy and half sampled, and how many drafts were accepted."""
    settings = (
        dict(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, compile_in_background=False) | settings
    )
    with LLM(**settings) as llm:
        out = llm.generate(PROMPTS[:16], [GREEDY, SAMPLED] * 8)
        return [o.outputs[0].token_ids for o in out], llm.engine.stats().accepted_tokens


def test_no_drafter_changes_a_token() -> None:
    plain, none = answers(draft=[])
    assert none == 0
    for settings in (
        dict(max_num_seqs=2),  # the default chooses: with sixteen at once, to draft next to nothing
        dict(draft="ngram", tree="chain"),
        dict(draft="truncated:4", tree="global_greedy", draft_nodes=16),
        dict(draft="smollm2-eagle-small", tree="fixed"),
        dict(draft="smollm2-eagle", tree="chain"),
        dict(draft="smollm2-eagle-large", tree="equal_greedy", draft_nodes=32),
        dict(draft="smollm2-eagle", tree="adaserve", pace="deadline", slo={"tpot_ms": 8.0}, max_num_seqs=4),
    ):
        tokens, accepted = answers(**settings)
        assert tokens == plain
        assert accepted > 50, settings
