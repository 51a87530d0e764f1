"""INT8 KV cache, quantised per channel and page (`kv_cache_dtype: int8`).

A page fills token by token, and the ranges of its channels grow. So the page that a running request is filling is also
kept unquantised, as its "open page", and each step requantises it from there into the pool: every value in the pool has
been rounded once. The host decides which request uses which open page (`OpenPages`). If a request's open page was
reused for another request, it is reloaded from the pool, and its values are rounded a second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import feature_width
from jaxspec.step.batch import Batch
from jaxspec.step.kv_cache import POSITIONS, KVCache, Zeros, keep_features, paged_features
from jaxspec.step.quantization import Quantized, dequantize, quantize


class Int8KVCache(NamedTuple):
    """Quantised `kv_cache.KVCache`. Scales, zero points `[layers, pages, kv_heads, head_dim]`; S open pages."""

    keys: jax.Array  # [layers, pages, kv_heads, head_dim, page_size] uint8
    values: jax.Array  # [layers, pages, kv_heads, page_size, head_dim] uint8
    features: jax.Array
    key_scale: jax.Array  # bfloat16
    key_zero: jax.Array  # int16
    value_scale: jax.Array
    value_zero: jax.Array
    open_keys: jax.Array  # [layers, S, kv_heads, head_dim, page_size], unquantised
    open_values: jax.Array  # [layers, S, kv_heads, page_size, head_dim], unquantised

    @classmethod
    def zeros(
        cls, config: DecoderConfig, pages: int, page_size: int, dtype: str, features: bool, slots: int,
        zeros: Zeros = jnp.zeros,
    ) -> Int8KVCache:  # fmt: skip
        """Allocate an empty cache with `slots` open pages. See `KVCache.zeros`."""
        layers, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
        channels = (layers, pages, heads, dim)
        return cls(
            keys=zeros((*channels, page_size), jnp.uint8),
            values=zeros((layers, pages, heads, page_size, dim), jnp.uint8),
            features=zeros((pages if features else 0, page_size, feature_width(config)), dtype),
            key_scale=zeros(channels, jnp.bfloat16),
            key_zero=zeros(channels, jnp.int16),
            value_scale=zeros(channels, jnp.bfloat16),
            value_zero=zeros(channels, jnp.int16),
            open_keys=zeros((layers, slots, heads, dim, page_size), dtype),
            open_values=zeros((layers, slots, heads, page_size, dim), dtype),
        )

    @property
    def paged(self) -> list[tuple[str, int]]:
        """Non-empty fields, each with its axis of pages."""
        fields = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero")
        return [*((name, 1) for name in fields), *paged_features(self.features)]

    @property
    def channels(self) -> tuple[jax.Array, ...]:
        """Scale and zero point of keys, then those of values."""
        return self.key_scale, self.key_zero, self.value_scale, self.value_zero

    def read(self, layer: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Dequantised keys `[B, kv_heads, head_dim, page_size]` and values `[B, kv_heads, page_size, head_dim]` of B
        pages, float32."""
        at = layer, page
        keys = Quantized(self.keys[at], self.key_scale[at], self.key_zero[at])
        values = Quantized(self.values[at], self.value_scale[at], self.value_zero[at])
        return dequantize(keys, POSITIONS["keys"]), dequantize(values, POSITIONS["values"])

    def stored(self, x: jax.Array) -> jax.Array:
        """`x` itself: a position's codes depend on its page, see `KVCache.stored`."""
        return x

    def keep(self, features: jax.Array, slot: jax.Array, accepted: jax.Array) -> Self:
        """See `KVCache.keep`."""
        return self._replace(features=keep_features(self.features, features, slot, accepted))

    def commit(self, new: tuple[jax.Array, jax.Array], batch: Batch, accepted: jax.Array, after: jax.Array) -> Self:
        """Write the accepted tokens' KV, `[layers, T, kv_heads, head_dim]` each. `after`: see `Layers.commit`."""
        new, _ = lax.optimization_barrier((new, after))
        size, written, tree = self.keys.shape[-1], batch.written, batch.written_tree
        count = written.shape[0]
        accepted = accepted & (batch.slot >= 0)
        place, offset = jnp.where(accepted, batch.place, count), batch.slot % size
        committed = batch.committed.at[tree].get(mode="clip")
        before = jnp.clip(committed - batch.written_base, 0, size)
        filled = jnp.zeros(count, jnp.int32).at[place].max(offset + 1, mode="drop")
        used = jnp.maximum(before, filled)  # positions of each page that are in use
        slots = batch.opened.at[tree].get(mode="clip")
        reread = (before > 0) & (batch.reread.at[tree].get(mode="clip") > 0)
        contents = self._contents(slots, written, reread)
        k, v = (x.swapaxes(0, 1).astype(self.open_keys.dtype) for x in new)  # [T, layers, kv_heads, head_dim]
        exact_keys = contents[0].at[:, place, :, :, offset].set(k, mode="drop")
        exact_values = contents[1].at[:, place, :, offset].set(v, mode="drop")
        valid = jnp.arange(size) < used[:, None]  # [W, P]
        keys = quantize(exact_keys, POSITIONS["keys"], valid[:, None, None, :])
        values = quantize(exact_values, POSITIONS["values"], valid[:, None, :, None])
        page = jnp.where((written >= 0) & (used > 0), written, self.keys.shape[1])  # out of bounds: dropped
        # The page with a request's last position becomes or stays its open page.
        added = jnp.zeros_like(batch.committed).at[batch.tree].add(accepted.astype(jnp.int32), mode="drop")
        end = committed + added.at[tree].get(mode="clip")
        last = (written >= 0) & (batch.written_base < end) & (end <= batch.written_base + size)
        slot = jnp.where(last, slots, self.open_keys.shape[1])

        def put(whole: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
            return whole.at[:, at].set(rows.astype(whole.dtype), mode="drop")

        return self._replace(
            keys=put(self.keys, page, keys.codes),
            values=put(self.values, page, values.codes),
            key_scale=put(self.key_scale, page, keys.scale),
            key_zero=put(self.key_zero, page, keys.zero),
            value_scale=put(self.value_scale, page, values.scale),
            value_zero=put(self.value_zero, page, values.zero),
            open_keys=put(self.open_keys, slot, exact_keys),
            open_values=put(self.open_values, slot, exact_values),
        )

    def _contents(self, slots: jax.Array, page: jax.Array, reread: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of W pages, from their open pages or, where `reread [W]`, dequantised from the pool."""
        opened = self.open_keys[:, slots], self.open_values[:, slots]

        def mixed() -> tuple[jax.Array, jax.Array]:
            at = slice(None), page
            keys = Quantized(self.keys[at], self.key_scale[at], self.key_zero[at])
            values = Quantized(self.values[at], self.value_scale[at], self.value_zero[at])
            mask = reread[:, None, None, None]
            dtype = self.open_keys.dtype
            return (
                jnp.where(mask, dequantize(keys, POSITIONS["keys"], dtype), opened[0]),
                jnp.where(mask, dequantize(values, POSITIONS["values"], dtype), opened[1]),
            )

        return lax.cond(jnp.any(reread), mixed, lambda: opened)


AnyKVCache = KVCache | Int8KVCache
P = TypeVar("P", bound=KVCache | Int8KVCache)


class OpenPages:
    """Assigns open pages to pages of the pool, on the host. Evicts the least recently used."""

    def __init__(self, slots: int):
        self._slot_of: dict[int, int] = {}
        self._pages: OrderedDict[int, set[int]] = OrderedDict((slot, set()) for slot in range(slots))

    def assign(self, writes: Sequence[tuple[Sequence[int], bool, int | None]]) -> tuple[np.ndarray, np.ndarray]:
        """Assign an open page to each request of a step.

        `writes`: for each request, the pages that the step may write, in order; whether the first already holds
        positions; and the page before it, None at the start. At most as many requests as open pages. Returns the open
        pages `[R]` int32, and whether each must be reread from the pool first `[R]` bool.
        """
        found = [self._slot_of.get(pages[0]) if begun else None for pages, begun, _ in writes]
        for i, (pages, begun, before) in enumerate(writes):
            if not begun and (slot := self._finished_with(pages[0], before)) not in found:
                found[i] = slot
        for slot in found:
            if slot is not None:
                self._pages.move_to_end(slot)
        slots = []
        for (pages, _, _), slot in zip(writes, found, strict=True):
            if slot is None:
                slot = next(iter(self._pages))
            self._evict(slot)
            self.forget(pages)
            self._pages[slot] = set(pages)
            self._pages.move_to_end(slot)
            self._slot_of.update((page, slot) for page in pages)
            slots.append(slot)
        reread = [begun and slot is None for (_, begun, _), slot in zip(writes, found, strict=True)]
        return np.asarray(slots, np.int32), np.asarray(reread, bool)

    def _finished_with(self, page: int, before: int | None) -> int | None:
        """Slot of the open page that a request has just filled, and no longer needs as it begins `page`.

        Without this it would take another request's open page, whose content would be rounded a second time.
        """
        if (slot := self._slot_of.get(page)) is not None:  # drafts of the previous step reached the page
            return slot
        slot = None if before is None else self._slot_of.get(before)
        return slot if slot is not None and self._pages[slot] == {before} else None

    def _evict(self, slot: int) -> None:
        for page in self._pages[slot]:
            del self._slot_of[page]
        self._pages[slot] = set()

    def forget(self, pages: Iterable[int]) -> None:
        """Drop open pages of pool pages that something other than a step has written."""
        for page in pages:
            if (slot := self._slot_of.pop(page, None)) is not None:
                self._pages[slot].discard(page)


def most_written(tokens: int, trees: int, page_size: int) -> int:
    """Maximum pages that a step writes: the nodes of a tree may start and end anywhere within a page."""
    return min(tokens, 2 * trees + tokens // page_size)
