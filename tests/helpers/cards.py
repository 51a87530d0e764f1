"""GPUs that are not here: fake devices with the memory of real cards, and the shapes of models to put on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxspec.bench.gpu.models import MODELS
from jaxspec.models.config import DecoderConfig

#: Bytes of each card, as CUDA reports them.
CARDS = {"h200": 150e9, "h100": 84.9e9, "a100": 84.9e9, "a100-40": 42e9, "l4": 23.6e9}
CORES = {"h200": 132, "h100": 132, "a100": 108, "a100-40": 108, "l4": 58}
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
VARIABLES = (FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")

LLAMA_8B = MODELS["llama-3.1-8b"]
#: As it is served: with one matrix for embedding and head.
SMOLLM2 = replace(MODELS["smollm2-135m"], tie_embeddings=True)


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


def drafter(target: DecoderConfig, layers: int = 1, vocab: int = 32000) -> tuple[DecoderConfig, Any]:
    """A conditioned draft model with a reduced vocabulary: what sizing reads of it."""
    c = replace(target, num_layers=layers)
    return c, {"mix": np.zeros(0), "fuse": np.zeros(0), "vocab": np.zeros(vocab, np.int32)}
