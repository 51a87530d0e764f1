"""The layers with XLA operations, on any device: layers are unrolled, each has its own weight arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder, device_weights
from jaxspec.models.drafter import DraftDecoder
from jaxspec.models.layers import XLA
from jaxspec.models.rotary import Rope
from jaxspec.step.attention import Earlier, block_pages
from jaxspec.step.attention import attend as attend_parts
from jaxspec.step.batch import Batch
from jaxspec.step.buckets import CPU, StepSizes
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, P
from jaxspec.step.layers import NewKV
from jaxspec.step.tensor_parallel import SHARDED, TensorParallel

#: (query, key, value of the step's nodes, layer index, sliding window) -> (output `[T, heads, head_dim]`, the keys and
#: values to commit)
LayerAttention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, int | None], tuple[jax.Array, tuple[jax.Array, jax.Array]]
]


class XlaLayers:
    """`jaxspec.step.layers.Layers` with XLA operations."""

    name = "xla"
    sizes: StepSizes = CPU
    few_rows = 0
    steady = False

    def __init__(self, parallel: TensorParallel | None = None) -> None:
        """`parallel`: the devices that the layers are split over; None: one device."""
        self.parallel = parallel
        self.operations = XLA if parallel is None else SHARDED

    @property
    def version(self) -> str:
        return self.name if self.parallel is None else f"{self.name} over {self.parallel.size} devices"

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype) if self.parallel is None else self.parallel.zeros(shape, dtype)

    def pooled(self, config: DecoderConfig) -> DecoderConfig:
        return config if self.parallel is None else self.parallel.shards(config).pooled

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        if self.parallel is None:
            return Decoder(config, device_weights(config, weights, dtype), self.operations)
        shards = self.parallel.shards(config)
        w = device_weights(config, weights, dtype, put=partial(self.parallel.put, shards))
        return Decoder(shards.local, w, self.operations)

    def drafter(
        self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str, target: Mapping[str, jax.Array]
    ) -> DraftDecoder:
        untied, vocab = replace(config, tie_embeddings=False), jnp.asarray(weights["vocab"])
        if self.parallel is None:
            w = device_weights(untied, weights, dtype, target)
            return DraftDecoder(config, {**w, "vocab": vocab}, self.operations)
        shards = self.parallel.shards(config)
        w = device_weights(untied, weights, dtype, target, partial(self.parallel.put, shards))
        return DraftDecoder(shards.local, {**w, "vocab": self.parallel.copied(vocab)}, self.operations)

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
        c = model.config
        rope = model.rope(batch.position)
        attention = self.attention(c, kv_cache, batch, mask, earlier)

        def layer_of(window: int | None, kind: int) -> Callable:
            def one(state: nnx.State, i: jax.Array, x: jax.Array, rope: Rope, graph: nnx.GraphDef) -> tuple:
                new: list[tuple[jax.Array, jax.Array]] = []

                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    out, kv = attention(q, kv_cache.stored(k), kv_cache.stored(v), i, window)
                    new.append(kv)
                    return out

                return nnx.merge(graph, state)(x, rope, attend, kind), new[0]

            # jit: equal layers are traced and lowered once instead of thirty times. XLA inlines the calls.
            return jax.jit(one, static_argnames="graph")

        kinds = [(c.window_of(i), c.rope_of(i)) for i in range(c.num_layers)]
        runs = {kind: layer_of(*kind) for kind in {*kinds}}
        new, outputs = [], []
        for i, block in enumerate(model.layers):
            graph, state = nnx.split(block)
            x, kv = runs[kinds[i]](state, jnp.int32(i), x, rope, graph=graph)
            new.append(kv)
            outputs.append(x)
        keys, values = zip(*new, strict=True)
        tapped = jnp.stack([outputs[i] for i in taps]) if taps else x[None, :0]
        return x, (jnp.stack(keys), jnp.stack(values)), tapped

    def attention(
        self, config: DecoderConfig, kv_cache: AnyKVCache, batch: Batch, mask: jax.Array, earlier: Earlier | None
    ) -> LayerAttention:
        """The attention of the step's layers. Traced, once a step."""

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, window: int | None
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            out = attend_parts(q, k, v, kv_cache, layer, batch, mask, window, earlier, config.attention_softcap)
            return out, (k, v)

        return attend

    def commit(self, kv_cache: P, new: NewKV, batch: Batch, accepted: jax.Array, after: jax.Array) -> P:
        if isinstance(kv_cache, Int8KVCache):
            return kv_cache.commit(new, batch, accepted, after)
        page_size, slot = kv_cache.keys.shape[-1], batch.slot
        row = jnp.where(accepted & (slot >= 0), slot // page_size, kv_cache.keys.shape[1])  # out of bounds: dropped
        offset = slot % page_size
        k, v = (x.swapaxes(0, 1).astype(kv_cache.keys.dtype) for x in new)  # [T, layers, kv_heads, head_dim]
        return kv_cache._replace(
            keys=kv_cache.keys.at[:, row, :, :, offset].set(k, mode="drop"),
            values=kv_cache.values.at[:, row, :, offset].set(v, mode="drop"),
        )

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        size = block_pages(page_size)
        return int(-(-(-(-committed // page_size)).sum() // size)) * size * page_size
