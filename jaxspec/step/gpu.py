"""The layers on NVIDIA GPUs: XLA's matrix products, and kernels of its own for tree attention and for experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.kernels import expert_products, tree_attention
from jaxspec.models.config import DecoderConfig
from jaxspec.step import work_items
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.buckets import GPU
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.tensor_parallel import TensorParallel
from jaxspec.step.xla import LayerAttention, XlaLayers


class GpuLayers(XlaLayers):
    """`jaxspec.step.layers.Layers` on GPUs. Every layer has weight arrays of its own: XLA would copy slices of stacked
    weights in every step. `interpret`: run the kernels on the CPU, for tests."""

    name = "gpu"
    sizes = GPU
    steady = True

    def __init__(self, interpret: bool = False, parallel: TensorParallel | None = None) -> None:
        super().__init__(parallel)
        self._interpret = interpret
        self.operations = self.operations._replace(grouped=partial(expert_products.multiply, interpret=interpret))

    @property
    def version(self) -> str:
        return f"{super().version}, steady"

    def attention(
        self, config: DecoderConfig, kv_cache: AnyKVCache, batch: Batch, mask: jax.Array, earlier: Earlier | None
    ) -> LayerAttention:
        rows = tile_rows(batch.token.shape[0], kv_cache.keys.dtype)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        items = work_items.plan(batch, heads // kv_heads, rows, kv_cache.keys.shape[-1])

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, window: int | None
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            # One array, so that one kernel writes all three. Without the barrier XLA computes keys and values once more
            # for the commit, from partial sums of the projection that it keeps for all layers until then.
            qkv = lax.optimization_barrier(jnp.concatenate([q, k, v], 1))
            out = tree_attention.attend(
                qkv, kv_heads, kv_cache, layer, batch, items, rows, window, earlier, config.attention_softcap,
                self._interpret,
            )  # fmt: skip
            return out, (qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])

        return attend

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return int((-(-committed // page_size)).sum()) * page_size


def tile_rows(tokens: int, dtype: Any) -> int:
    """Rows of an attention tile in steps of `tokens`: small steps verify small trees, large ones compute prompts.

    `dtype`: of the KV pool. With float32 keys and values, tiles of 64 rows do not fit the shared memory of small cards.
    """
    return 16 if tokens <= 64 else 32 if tokens <= 512 or jnp.dtype(dtype) == jnp.float32 else 64


def supports(config: DecoderConfig) -> bool:
    """Whether the kernel takes this model: Triton's blocks have sizes that are powers of two, 16 at least."""
    return config.head_dim >= 16 and config.head_dim & (config.head_dim - 1) == 0
