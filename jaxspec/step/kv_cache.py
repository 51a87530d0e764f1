"""The KV cache on the device: pages of all layers in two arrays, keys and values.

Within a page, keys are `[head_dim, page_size]` and values `[page_size, head_dim]`: scores sum over rows of keys and
outputs over rows of values, so both read contiguous vectors without a transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import psutil

from jaxspec.config import EngineConfig
from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import feature_width
from jaxspec.step.quantization import CHANNEL_BYTES, rounded

T = TypeVar("T")

#: (shape, dtype) -> array
Zeros = Callable[[Sequence[int], Any], jax.Array]
#: Field of the cache -> axis of positions within a page.
POSITIONS = {"keys": -1, "values": -2, "features": -2}


class KVCache(NamedTuple):
    """Unquantised KV cache."""

    keys: jax.Array  # [layers, pages, kv_heads, head_dim, page_size]
    values: jax.Array  # [layers, pages, kv_heads, page_size, head_dim]
    #: Feature pool: the target's features of committed positions, for conditioned drafters; without one, pages is 0.
    features: jax.Array  # [pages, page_size, TAPS * hidden]

    @classmethod
    def zeros(
        cls, config: DecoderConfig, pages: int, page_size: int, dtype: str, features: bool = False,
        zeros: Zeros = jnp.zeros,
    ) -> KVCache:  # fmt: skip
        """Allocate an empty cache. `features`: with a feature pool of `dtype`; `zeros`: allocates the arrays."""
        shape, dim = (config.num_layers, pages, config.num_kv_heads), config.head_dim
        return cls(
            zeros((*shape, dim, page_size), dtype),
            zeros((*shape, page_size, dim), dtype),
            zeros((pages if features else 0, page_size, feature_width(config)), dtype),
        )

    @property
    def paged(self) -> list[tuple[str, int]]:
        """Non-empty fields, each with its axis of pages."""
        return [("keys", 1), ("values", 1), *paged_features(self.features)]

    @property
    def channels(self) -> tuple[jax.Array, ...]:
        """Scales and zero points: none. See `Int8KVCache`."""
        return ()

    def read(self, layer: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys `[B, kv_heads, head_dim, page_size]` and values `[B, kv_heads, page_size, head_dim]` of B pages."""
        return self.keys[layer, page], self.values[layer, page]

    def stored(self, x: jax.Array) -> jax.Array:
        """`x` rounded to the pool's data type, in its own.

        Attention within a step uses these numbers too, so tokens are the same whether they are committed one by one or
        many at a time.
        """
        if x.dtype == self.keys.dtype:
            return x
        return rounded(x, self.keys.dtype).astype(x.dtype)

    def keep(self, features: jax.Array, slot: jax.Array, accepted: jax.Array) -> KVCache:
        """Write `features [T, TAPS * hidden]` of accepted nodes to their slots (`[T]`, -1: none)."""
        return self._replace(features=keep_features(self.features, features, slot, accepted))


def keep_features(kept: jax.Array, features: jax.Array, slot: jax.Array, accepted: jax.Array) -> jax.Array:
    """Write a step's features to the feature pool, see `KVCache.keep`."""
    pages, page_size, _ = kept.shape
    page = jnp.where(accepted & (slot >= 0), slot // page_size, pages)  # out of bounds: dropped
    return kept.at[page, slot % page_size].set(features.astype(kept.dtype), mode="drop")


def paged_features(features: jax.Array) -> list[tuple[str, int]]:
    """The feature pool's entry of `KVCache.paged`, if there is one."""
    return [("features", 0)] if features.shape[0] else []


def page_bytes(config: DecoderConfig, page_size: int, dtype: str) -> int:
    """Bytes of one page: keys and values of all layers; with "int8", scale and zero point of each channel too."""
    channel = page_size + CHANNEL_BYTES if dtype == "int8" else page_size * jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * config.kv_size * channel


def feature_bytes(config: DecoderConfig, page_size: int, dtype: str) -> int:
    """Bytes of one page of the feature pool."""
    return page_size * feature_width(config) * jnp.dtype(dtype).itemsize


def pages_for(config: EngineConfig, model: DecoderConfig, dtype: str, features: bool = False) -> int:
    """Number of pages of the KV cache in host memory; `step.device_memory` has the rule for GPUs. `dtype`: of the KV.
    `features`: with a feature pool.

    As configured (`kv_cache_tokens`), else enough for 64 requests of 512 tokens and for one of maximum length, limited
    to 40 % of the free memory.
    """
    size = config.page_size
    if config.kv_cache_tokens is not None:
        return max(1, -(-config.kv_cache_tokens // size))
    longest = min(config.max_model_len or model.max_position, model.max_position)
    wanted = min(64 * 512, config.max_num_seqs * longest) // size
    page = page_bytes(model, size, stored_as(config, dtype)) + feature_bytes(model, size, dtype) * features
    affordable = int(0.4 * psutil.virtual_memory().available) // page
    return max(1, min(max(wanted, -(-longest // size)), affordable))


def stored_as(config: EngineConfig, dtype: str) -> str:
    """Data type of the target's KV pool, for weights of `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def emptied(arrays: T) -> T:
    """Zeros in place of these arrays, on the same devices. Arrays may be deleted already; the others are deleted first,
    so that there is never memory for both."""
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), arrays)
