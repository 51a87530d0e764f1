"""GPUs that are not here: fake devices with the memory of real cards, and the shapes of models to put on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.models.config import DecoderConfig

#: Bytes of each card, as CUDA reports them.
CARDS = {"h200": 150e9, "h100": 84.9e9, "a100": 84.9e9, "a100-40": 42e9, "l4": 23.6e9}
CORES = {"h200": 132, "h100": 132, "a100": 108, "a100-40": 108, "l4": 58}
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
VARIABLES = (FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")

LLAMA_8B = DecoderConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position=131072,
)  # fmt: skip
SMOLLM2 = DecoderConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, max_position=8192, tie_embeddings=True,
)  # fmt: skip


@dataclass
class Card:
    """A fake `jax.Device`. Without a fraction JAX does not say how much memory there is."""

    kind: str
    fraction: float | None
    in_use: int = 0
    id: int = 0
    platform: str = "gpu"

    @property
    def device_kind(self) -> str:
        return self.kind

    @property
    def core_count(self) -> int:
        return CORES[self.kind]

    def memory_stats(self) -> dict[str, int] | None:
        if self.fraction is None:
            return None
        return {"bytes_limit": int(CARDS[self.kind] * self.fraction), "bytes_in_use": self.in_use}


def install(patch: pytest.MonkeyPatch, *cards: Card) -> None:
    """Let JAX have these cards; the environment says which fraction it took of the first."""
    for name in VARIABLES:
        patch.delenv(name, raising=False)
    if cards[0].fraction is not None:
        patch.setenv(FRACTION, str(cards[0].fraction))
    patch.setattr("jax.devices", lambda: list(cards))
    patch.setattr("jax.default_backend", lambda: "gpu")


def weights(c: DecoderConfig) -> dict[str, Any]:
    """Arrays of the shapes of the model's weights, without content."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    if not c.tie_embeddings:
        shapes["head"] = (c.hidden_size, c.vocab_size)
    for i in range(c.num_layers):
        shapes |= {
            f"layers.{i}.attn_norm": (c.hidden_size,),
            f"layers.{i}.mlp_norm": (c.hidden_size,),
            f"layers.{i}.qkv": (c.hidden_size, c.q_size + 2 * c.kv_size),
            f"layers.{i}.o": (c.q_size, c.hidden_size),
            f"layers.{i}.gate_up": (c.hidden_size, 2 * c.intermediate_size),
            f"layers.{i}.down": (c.intermediate_size, c.hidden_size),
        }
    return {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}


def drafter(target: DecoderConfig, layers: int = 1, vocab: int = 32000) -> tuple[DecoderConfig, Any]:
    """A conditioned draft model with a reduced vocabulary."""
    c = replace(target, num_layers=layers)
    own = weights(c) | {
        "head": SimpleNamespace(shape=(c.hidden_size, vocab)),
        "fuse": SimpleNamespace(shape=(2 * c.hidden_size, c.hidden_size)),
        "vocab": np.zeros(vocab, np.int32),
    }
    return c, own
