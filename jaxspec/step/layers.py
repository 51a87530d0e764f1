"""What a step's layers run on: XLA's own operations anywhere, or the project's kernels on CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import DraftDecoder
from jaxspec.models.llama import Decoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache, P

#: Keys and values of the step's own tokens, each `[layers, T, kv_heads, head_dim]`.
NewKV = tuple[jax.Array, jax.Array]


class Layers(Protocol):
    """One way to hold a model's weights, to run its layers and to commit what they computed. No state of its own."""

    name: str

    @property
    def version(self) -> str:
        """Another one where the same programs may take another time."""
        ...

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """An array of zeros, for pools."""
        ...

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        """The model with `weights` (as `load_model` gives them) on the device."""
        ...

    def drafter(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> DraftDecoder:
        """The same for a drafter (`jaxspec.models.drafter`)."""
        ...

    def run(
        self,
        model: Decoder | DraftDecoder,
        x: jax.Array,
        pool: AnyKVCache,
        batch: Batch,
        mask: jax.Array,
        earlier: Earlier | None = None,
    ) -> tuple[jax.Array, NewKV]:
        """All layers over embedded tokens `x [T, hidden]`, mask `[T, T]` of ancestors -> `[T, hidden]` and the new KV.

        `earlier`: ancestors that are neither in the batch nor in the pool. Traced.
        """
        ...

    def commit(self, pool: P, new: NewKV, batch: Batch, accepted: jax.Array, after: jax.Array) -> P:
        """Write accepted tokens' KV to their slots, in place where the pool is donated. Traced.

        `after` is what `run` gave: the last layer's KV does not depend on that layer's attention, and a pool that might
        be written before it is read would be copied.
        """
        ...

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        """KV positions that a layer reads, padding included, for trees with `committed [trees]` positions."""
        ...
