"""A tiny random model, and plain greedy decoding as the reference for served requests."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.fakes import ByteTokenizer, as_tokenizer
from jaxspec.llm import LLM
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder, device_weights, forward
from jaxspec.models.load import LoadedModel

#: Sequences are padded to a multiple of this length, so that the forward pass compiles once.
LONGEST = 96


def config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = dict(
        family="llama", vocab_size=257, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position=512, tie_embeddings=True, eos_token_ids=(256,),
    )  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})


def weights(c: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, scaled so that logits differ by whole units: rounding errors do not change an argmax."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    out = {"embed": random(c.vocab_size, c.hidden_size) * 16, "norm": np.full(c.hidden_size, 2.0, np.float32)}
    for i in range(c.num_layers):
        layer = {
            "attn_norm": np.ones(c.hidden_size, np.float32),
            "mlp_norm": np.ones(c.hidden_size, np.float32),
            "qkv": 2 * random(c.hidden_size, c.q_size + 2 * c.kv_size),
            "o": 4 * random(c.q_size, c.hidden_size),
            "gate_up": 2 * random(c.hidden_size, 2 * c.intermediate_size),
            "down": 4 * random(c.intermediate_size, c.hidden_size),
        }
        out |= {f"layers.{i}.{name}": w for name, w in layer.items()}
    if not c.tie_embeddings:
        out["head"] = random(c.hidden_size, c.vocab_size)
    return out


@lru_cache
def model(window: int | None = None) -> LoadedModel:
    c = config(sliding_window=window)
    return LoadedModel(c, weights(c), as_tokenizer(ByteTokenizer()), "tiny")


def llm(**settings: Any) -> LLM:
    """An `LLM` with `model()` that compiles all programs before it serves."""
    given: dict[str, Any] = {"compile_in_background": False, "show_progress": False} | settings
    return LLM(model(), **given)


@lru_cache
def _forward(window: int | None) -> Any:
    loaded = model(window)
    decoder = Decoder(loaded.config, device_weights(loaded.config, loaded.weights, "float32"))
    return jax.jit(lambda tokens: forward(decoder, tokens))


def logits(tokens: list[int], window: int | None = None) -> np.ndarray:
    """Logits `[len(tokens), vocab]` of the plain forward pass."""
    padded = np.zeros(-(-len(tokens) // LONGEST) * LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_forward(window)(jnp.asarray(padded)))[: len(tokens)]


@cache
def _greedy(prompt: tuple[int, ...], count: int, window: int | None) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(tokens, window)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def greedy(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    """The next `count` greedy tokens after `prompt`, computed with one full forward pass per token."""
    return list(_greedy(tuple(prompt), count, window))
