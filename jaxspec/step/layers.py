"""What a step's layers run on: XLA's own operations anywhere, or the project's kernels on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from jaxspec.models.config import DecoderConfig
from jaxspec.models.llama import Decoder
from jaxspec.step.batch import Batch
from jaxspec.step.pool import Pool

#: Keys and values of the step's own tokens, each `[layers, T, kv_heads, head_dim]`.
NewKV = tuple[jax.Array, jax.Array]


class Layers(Protocol):
    """One way to hold a model's weights, to run its layers and to commit what they computed. No state of its own."""

    name: str

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        """The model with `weights` (as `load_model` gives them) on the device."""
        ...

    def run(self, model: Decoder, pool: Pool, batch: Batch, mask: jax.Array) -> tuple[jax.Array, NewKV]:
        """Embedding and all layers: mask `[T, T]` of ancestors -> `[T, hidden]` and the new KV. Traced."""
        ...

    def commit(self, pool: Pool, new: NewKV, slot: jax.Array, accepted: jax.Array) -> Pool:
        """Write accepted tokens' KV to their slots (`[T]`, -1: none), in place where the pool is donated. Traced."""
        ...

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        """KV positions that a layer reads, padding included, for trees with `committed [trees]` positions."""
        ...
