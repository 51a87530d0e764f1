"""The KV pool: pages of all layers in two arrays, keys and values.

Keys lie `[dim, page_size]` within a page and values `[page_size, dim]`: scores are sums over rows of keys and outputs
sums over rows of values, so both read whole vectors without turning anything.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.config import DecoderConfig


class Pool(NamedTuple):
    keys: jax.Array  # [layers, pages, kv_heads, head_dim, page_size]
    values: jax.Array  # [layers, pages, kv_heads, page_size, head_dim]

    @classmethod
    def zeros(cls, config: DecoderConfig, pages: int, page_size: int, dtype: str) -> Pool:
        shape = (config.num_layers, pages, config.num_kv_heads)
        return cls(
            jnp.zeros((*shape, config.head_dim, page_size), dtype),
            jnp.zeros((*shape, page_size, config.head_dim), dtype),
        )


def page_bytes(config: DecoderConfig, page_size: int, dtype: str) -> int:
    """Bytes of one page in all layers, keys and values."""
    return 2 * config.num_layers * config.kv_size * page_size * jnp.dtype(dtype).itemsize
