"""Speculation on the real model: the same tokens as without, greedy and sampled."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.bench.prompts import PROMPTS

pytestmark = pytest.mark.slow

LENGTH, REQUESTS = 32, 4
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=LENGTH, ignore_eos=True, seed=11)


def answers(**settings: object) -> tuple[list[list[int]], int]:
    """Tokens for a few prompts, half of them greedy and half sampled, and how many drafts were accepted."""
    sizes: dict[str, Any] = dict(max_num_seqs=REQUESTS, max_num_batched_tokens=32, max_model_len=128)
    sizes |= dict(token_buckets=[32], compile_in_background=False)
    with LLM(**{**sizes, **settings}) as llm:
        out = llm.generate(PROMPTS[:REQUESTS], [GREEDY, SAMPLED] * (REQUESTS // 2))
        return [o.outputs[0].token_ids for o in out], llm.engine.stats().accepted_tokens


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    tokens, none = answers(draft=[])
    assert none == 0
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_seqs=2),  # the default chooses: with many at once, to draft next to nothing
        dict(draft=["ngram", "truncated:4"], tree="chain"),
        dict(draft="smollm2-eagle", tree="fixed"),
        dict(
            draft="smollm2-eagle", tree="adaserve", adaserve={"economic": False}, pace="deadline", slo={"tpot_ms": 40.0}
        ),
    ],
    ids=lambda settings: settings.get("tree", "default"),
)
def test_no_drafter_changes_a_token(plain: list[list[int]], settings: dict[str, Any]) -> None:
    tokens, accepted = answers(**settings)
    assert tokens == plain
    if "tree" in settings:  # the default may find that drafts do not pay here
        assert accepted > 5
