"""A small distillation: settings of a run, and random training data for the tiny target."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import tiny
from jaxspec.draft.distill.config import DistillConfig

TARGET = tiny.model()
VOCAB = TARGET.config.vocab_size
LONGEST = 48
#: A whole run, short: two checkpoints and evaluations, a vocabulary that leaves most tokens out.
RUN: dict[str, Any] = dict(
    data=["unread"], work="unread", out="unread.safetensors", longest=LONGEST, vocabulary=64,
    steps=8, every=4, batch=4, learning_rate=3e-3, warmup=1,
)  # fmt: skip


def settings(**changes: Any) -> DistillConfig:
    return DistillConfig(**{**RUN, **changes})


def answers(prompts: int, each: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Random tokens: `each` answers to every prompt."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(0, VOCAB, rng.integers(3, 12)).tolist() for _ in range(prompts)]
    return [
        {"prompt_ids": prompt, "output_ids": rng.integers(0, VOCAB, rng.integers(8, 30)).tolist()}
        for _ in range(each)
        for prompt in asked
    ]
