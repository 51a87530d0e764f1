"""A small distillation: settings of a run, and random training data for the tiny target."""

from __future__ import annotations

from functools import cache
from typing import Any

import chex
import jax
import numpy as np

from helpers import tiny
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.models.decoder import Decoder, device_weights, forward_features
from jaxspec.models.drafter import target_features

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


@cache
def plain_forward() -> Any:
    decoder = Decoder(TARGET.config, device_weights(TARGET.config, TARGET.weights, "float32"))
    run = chex.assert_max_traces(lambda t: (forward_features(decoder, t), target_features(decoder, t)), n=1)
    return jax.jit(run)


def final_and_features(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The target's final hidden states `[T, hidden]` and features `[T, TAPS * hidden]`."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    final, features = plain_forward()(padded)
    return np.asarray(final)[: len(tokens)], np.asarray(features)[: len(tokens)]
