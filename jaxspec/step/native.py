"""The layers on CPU with the C kernels: weights stacked over layers, one scan.

A kernel takes the stacked weights and a layer index. So nothing is sliced or copied, a step has a dozen arguments
instead of hundreds, and its program contains one layer and compiles in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.kernels import cpu
from jaxspec.kernels.packed import pack
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder, stacked_weights
from jaxspec.models.drafter import TAPS, DraftDecoder
from jaxspec.models.layers import Operations
from jaxspec.models.load.weights import stored_parts
from jaxspec.step.attention import Earlier, Partial, merge, over_earlier
from jaxspec.step.batch import Batch
from jaxspec.step.buckets import CPU
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, P
from jaxspec.step.layers import NewKV
from jaxspec.step.tensor_parallel import TensorParallel

#: Batch-invariant operations, and the fastest ones.
_INVARIANT = Operations(cpu.linear, cpu.lookup, cpu.norm, cpu.grouped)
_FASTEST = _INVARIANT._replace(
    product=partial(cpu.linear, untiled=cpu.FASTER_UNTILED), grouped=partial(cpu.grouped, untiled=cpu.FASTER_UNTILED)
)


class NativeLayers:
    """`jaxspec.step.layers.Layers` with the C kernels."""

    name = "native"
    sizes = CPU
    parallel: TensorParallel | None = None
    #: A step with a prompt has room for 64 rows and seldom needs more than one or two. Tokens do not depend on how many
    #: rows the kernels compute, if they are batch-invariant.
    few_rows = 8
    steady = False

    def __init__(self, batch_invariant: bool = True) -> None:
        """`batch_invariant`: a token's logits have the same bits in any batch. Drafters do without that: drafts change
        the speed only, and with rejection sampling the text of a seed depends on the drafts anyway."""
        self._operations = _INVARIANT if batch_invariant else _FASTEST

    @property
    def version(self) -> str:
        return cpu.load() + ("" if self._operations is _INVARIANT else " fastest")

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        return cpu.zeros(shape, dtype)

    def pooled(self, config: DecoderConfig) -> DecoderConfig:
        return config

    def decoder(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str) -> Decoder:
        return Decoder(config, stacked_weights(config, weights, pack), self._operations)

    def drafter(
        self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str, target: Mapping[str, jax.Array]
    ) -> DraftDecoder:
        w = stacked_weights(replace(config, tie_embeddings=False), weights, pack, target)
        for name, inputs in (("mix", TAPS), ("fuse", 2)):
            if name in weights:
                shape = config.hidden_size, inputs * config.hidden_size
                w[name] = jax.device_put(pack([stored_parts(weights, name, shape)]))
        return DraftDecoder(config, {**w, "vocab": jnp.asarray(weights["vocab"])}, _FASTEST)

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
        c, (block,) = model.config, model.layers
        rope = model.rope(batch.position)
        windows = jnp.asarray([c.window_of(i) or 0 for i in range(c.num_layers)], jnp.int32)
        kinds = jnp.asarray([c.rope_of(i) for i in range(c.num_layers)], jnp.int32)

        # Where each layer's output goes; the last row is overwritten by all layers that are not tapped.
        rows = sorted(set(taps))
        place = jnp.asarray([rows.index(i) if i in rows else len(rows) for i in range(c.num_layers)], jnp.int32)

        def layer(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], NewKV]:
            x, tapped = carry
            new: list[NewKV] = []

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                k, v = kv_cache.stored(k), kv_cache.stored(v)
                new.append((k, v))
                out, lse = cpu.attention(
                    q, k, v, kv_cache.keys, kv_cache.values, i, windows[i], batch.position, batch.subtree, batch.first,
                    batch.nodes, batch.committed, batch.table, kv_cache.channels, c.attention_softcap,
                )  # fmt: skip
                return out if earlier is None else _with_earlier(q, out, lse, earlier, i, c.attention_softcap)

            x = block(x, rope, attend, kinds[i], i)
            if taps:
                tapped = lax.dynamic_update_index_in_dim(tapped, x, place[i], 0)
            return (x, tapped), new[0]

        tapped = jnp.zeros((len(rows) + 1 if taps else 0, *x.shape), x.dtype)
        (x, tapped), new = lax.scan(layer, (x, tapped), jnp.arange(c.num_layers, dtype=jnp.int32))
        return x, new, tapped[np.asarray([rows.index(i) for i in taps], np.int32)]

    def commit(self, kv_cache: P, new: NewKV, batch: Batch, accepted: jax.Array, after: jax.Array) -> P:
        if isinstance(kv_cache, Int8KVCache):
            names = [name for name in kv_cache._fields if name != "features"]
            integers = (
                batch.slot, batch.tree, batch.place, batch.written, batch.written_tree, batch.written_base,
                batch.opened, batch.reread, batch.committed,
            )  # fmt: skip
            parts = cpu.commit_quantized([getattr(kv_cache, name) for name in names], *new, integers, accepted, after)
            return kv_cache._replace(**dict(zip(names, parts, strict=True)))
        keys, values = cpu.commit(kv_cache.keys, kv_cache.values, *new, batch.slot, accepted, after)
        return kv_cache._replace(keys=keys, values=values)

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return int((-(-committed // cpu.LANES) * cpu.LANES).sum())


def _with_earlier(
    q: jax.Array, out: jax.Array, lse: jax.Array, earlier: Earlier, layer: jax.Array, cap: float | None
) -> jax.Array:
    """Merge the kernel's output `[T, heads, dim]` with attention to ancestors of earlier levels."""
    t, heads, dim = q.shape
    kv = earlier.keys.shape[3]

    def by_kv(x: jax.Array) -> jax.Array:
        return x.reshape(t, kv, heads // kv, *x.shape[2:]).swapaxes(0, 1)

    kernel = Partial(by_kv(out), by_kv(lse), jnp.ones((kv, t, heads // kv)))
    both = merge(kernel, over_earlier(by_kv(q) * dim**-0.5, earlier, layer, cap))
    return (both.out / both.total[..., None]).swapaxes(0, 1).reshape(q.shape)
