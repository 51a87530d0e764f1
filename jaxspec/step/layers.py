"""Backends for a step's layers: XLA operations on any device (`xla`), or C kernels on CPU (`native`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.drafter import DraftDecoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.buckets import StepSizes
from jaxspec.step.kv_int8 import AnyKVCache, P
from jaxspec.step.tensor_parallel import TensorParallel

#: Keys and values of the step's tokens, each `[layers, T, kv_heads, head_dim]`.
NewKV = tuple[jax.Array, jax.Array]


class Layers(Protocol):
    """A backend: loads weights, runs layers, commits KV to the cache. Stateless."""

    name: str
    #: Sizes of the steps to compile.
    sizes: StepSizes
    #: The devices that models are split over; None: one device.
    parallel: TensorParallel | None
    #: Logit rows for which the head and `sample_plain` are compiled too, for steps with few; 0: steps take all rows.
    few_rows: int
    #: Whether programs keep their arrays where they are (`jaxspec.step.addresses`).
    steady: bool

    @property
    def version(self) -> str:
        """Identifies the code that runs: measured times are not reused for another version."""
        ...

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Allocate an array of zeros for a KV cache or a table."""
        ...

    def pooled(self, config: DecoderConfig) -> DecoderConfig:
        """The model's configuration with the KV heads that its page pool has."""
        ...

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        """Build the model with `weights` (from `load_model`) on the device."""
        ...

    def drafter(
        self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str, target: Mapping[str, jax.Array]
    ) -> DraftDecoder:
        """Build a draft model (`jaxspec.models.drafter`) on the device.

        `target`: embedding and head that it shares with a model of `decoder`, see `LazyWeights.of_target`.
        """
        ...

    def run(
        self,
        model: Decoder | DraftDecoder,
        x: jax.Array,
        kv_cache: AnyKVCache,
        batch: Batch,
        mask: jax.Array,
        earlier: Earlier | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[jax.Array, NewKV, jax.Array]:
        """Run all layers on embedded tokens `x [T, hidden]`. Traced.

        Returns `[T, hidden]`, the new KV, and the outputs `[len(taps), T, hidden]` of the layers `taps`; without any,
        an empty array.
        mask `[T, T]`: from `tree.ancestors`; `earlier`: ancestors that are neither in the batch nor in the pool.
        """
        ...

    def commit(self, kv_cache: P, new: NewKV, batch: Batch, accepted: jax.Array, after: jax.Array) -> P:
        """Write accepted tokens' KV to their slots, in place if the pool is donated. Traced.

        `after` is the output of `run`, as a dependency: the last layer's KV does not depend on that layer's attention,
        and XLA copies a pool that might be written before it is read.
        """
        ...

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        """KV positions that one layer reads, padding included, for trees with `committed [trees]` positions."""
        ...
