"""The layers on NVIDIA GPUs: XLA's matrix products, and tree attention as a kernel of its own."""

from __future__ import annotations

import jax
import numpy as np

from jaxspec.kernels import tree_attention
from jaxspec.models.config import DecoderConfig
from jaxspec.step import work_items
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.xla import LayerAttention, XlaLayers


class GpuLayers(XlaLayers):
    """`jaxspec.step.layers.Layers` on GPUs. Every layer has weight arrays of its own: XLA would copy slices of stacked
    weights in every step. `interpret`: run the kernel on the CPU, for tests."""

    name = version = "gpu"

    def __init__(self, interpret: bool = False) -> None:
        self._interpret = interpret

    def attention(
        self, config: DecoderConfig, kv_cache: AnyKVCache, batch: Batch, mask: jax.Array, earlier: Earlier | None
    ) -> LayerAttention:
        rows = tile_rows(batch.token.shape[0])
        items = work_items.plan(batch, config.num_heads // config.num_kv_heads, rows, kv_cache.keys.shape[-1])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, window: int | None) -> jax.Array:
            return tree_attention.attend(
                q, k, v, kv_cache, layer, batch, items, rows, window, earlier, self._interpret
            )  # fmt: skip

        return attend

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return int((-(-committed // page_size)).sum()) * page_size


def tile_rows(tokens: int) -> int:
    """Rows of an attention tile in steps of `tokens`: small steps verify small trees, large ones compute prompts."""
    return 16 if tokens <= 64 else 32 if tokens <= 512 else 64


def supports(config: DecoderConfig) -> bool:
    """Whether the kernel takes this model: Triton's blocks have sizes that are powers of two, 16 at least."""
    return config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
