"""Draft models for the tiny target."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.draft import registry
from jaxspec.draft import registry as drafters
from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import TAPS, DraftDecoder
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.weights import Weights


def conditioned(target: LoadedModel, layers: int = 1) -> tuple[Any, dict[str, np.ndarray]]:
    """A drafter that reads the target's features: the target's first layers, with random `mix` and
    `fuse` matrices and a random half of the vocabulary."""
    config, truncated = drafters.truncated(target, layers)
    weights = dict(truncated)
    rng = np.random.default_rng(5)
    h = config.hidden_size
    for name, inputs in (("mix", TAPS), ("fuse", 2)):
        weights[name] = (rng.normal(size=(inputs * h, h)) / np.sqrt(h)).astype(np.float32)
    weights["vocab"] = np.sort(rng.permutation(config.vocab_size)[: config.vocab_size // 2]).astype(np.int32)
    weights["head"] = np.ascontiguousarray(weights["head"][:, weights["vocab"]])
    return config, weights


def perfect(target: LoadedModel) -> tuple[Any, dict[str, np.ndarray]]:
    """The target itself as a drafter."""
    return target.config, dict(registry.whole(target))


def as_decoder(config: DecoderConfig, weights: Weights) -> DraftDecoder:
    """Build the drafter with XLA products."""
    return DraftDecoder(config, {k: jnp.asarray(v) for k, v in weights.items()})
