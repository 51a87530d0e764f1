"""A step's layers with the project's CPU kernels: weights stacked by kind, one scan over the layers.

A kernel takes the stack and a layer's number, so nothing is sliced or copied, a step has a dozen arguments instead of
hundreds, and its program holds one layer: it compiles in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.kernels import cpu
from jaxspec.models.config import DecoderConfig
from jaxspec.models.llama import Decoder, stacked_weights, window_of
from jaxspec.step.batch import Batch
from jaxspec.step.layers import NewKV
from jaxspec.step.pool import Pool


class NativeLayers:
    """See `jaxspec.step.layers.Layers`."""

    name = "native"

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        return Decoder(config, stacked_weights(config, weights, cpu.panels), cpu.linear)

    def run(self, model: Decoder, pool: Pool, batch: Batch, mask: jax.Array) -> tuple[jax.Array, NewKV]:
        c, (block,) = model.config, model.layers
        rope = model.rope(batch.position)
        windows = jnp.asarray([window_of(c, i) or 0 for i in range(c.num_layers)], jnp.int32)

        def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, NewKV]:
            new: list[NewKV] = []

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                new.append((k, v))
                return cpu.attention(
                    q, k, v, pool.keys, pool.values, i, windows[i], batch.position, batch.subtree, batch.first,
                    batch.nodes, batch.committed, batch.table,
                )  # fmt: skip

            return block(x, rope, attend, i), new[0]

        return lax.scan(layer, model.embed(batch.token), jnp.arange(c.num_layers, dtype=jnp.int32))

    def commit(self, pool: Pool, new: NewKV, slot: jax.Array, accepted: jax.Array) -> Pool:
        return Pool(*cpu.commit(pool.keys, pool.values, *new, slot, accepted))

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return int((-(-committed // cpu.LANES) * cpu.LANES).sum())
