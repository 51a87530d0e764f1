"""The KV pool: pages ("rows") in a few arrays a layer, and the commit of accepted tokens into them.

Keys lie `[rows, kv_heads, head_dim, page_size]` and values `[rows, kv_heads, page_size, head_dim]`: both products of
attention then read a whole array in place at memory speed. On CPU, copying rows out first costs six times the product
itself, and even a slice of an array is a copy; so the pool is cut into segments of growing size, and a step reads the
segments that are in use (measured: docs/results/attention.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.models.config import DecoderConfig

#: Per layer, per segment: (keys, values).
Pool = tuple[tuple[tuple[jax.Array, jax.Array], ...], ...]


def segment_sizes(rows: int) -> tuple[int, ...]:
    """Cut `rows` into segments that end at row 96, 256, 1024, 4096, …; a small rest joins the last one.

    Each segment costs a step about half a millisecond of dispatch, and a step shape a second of compiling; too few, and
    unused rows are read. 96 pages of 32 hold 16 requests of 190 tokens.
    """
    cuts = [96, *(4**i for i in range(4, 16))]
    ends = [c for c in cuts if c <= rows - c // 4] + [rows]
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def create(config: DecoderConfig, segments: tuple[int, ...], page_size: int, dtype: str) -> Pool:
    """A pool of zeros."""
    heads, dim = config.num_kv_heads, config.head_dim
    return tuple(
        tuple(
            (jnp.zeros((n, heads, dim, page_size), dtype), jnp.zeros((n, heads, page_size, dim), dtype))
            for n in segments
        )
        for _ in range(config.num_layers)
    )


def page_bytes(config: DecoderConfig, page_size: int, dtype: str) -> int:
    """Bytes of one page in all layers, keys and values."""
    return 2 * config.num_layers * config.kv_size * page_size * jnp.dtype(dtype).itemsize


def commit(pool: Pool, new: list[tuple[jax.Array, jax.Array]], slot: jax.Array, accepted: jax.Array) -> Pool:
    """Write the accepted tokens' keys and values to their slots, in place in the donated pool; drop the rest.

    new: per layer (key, value), each `[T, kv_heads, head_dim]`. slot `[T]`: row * page_size + offset, -1 for padding.
    XLA's scatter costs as much for a dropped token as for a written one, on CPU a loop iteration an array each. Here
    one loop a segment runs over that segment's accepted tokens only and writes all layers.
    """
    page_size = pool[0][0][1].shape[2]
    sizes = [keys.shape[0] for keys, _ in pool[0]]
    starts = np.cumsum([0, *sizes])
    row, offset = slot // page_size, slot % page_size
    segment = jnp.searchsorted(jnp.asarray(starts[1:]), row, side="right")
    segment = jnp.where(accepted & (slot >= 0), segment, len(sizes)).astype(jnp.int32)
    order = jnp.argsort(segment).astype(jnp.int32)
    counts = jnp.sum(segment[:, None] == jnp.arange(len(sizes))[None, :], axis=0)
    bounds = jnp.concatenate([jnp.zeros(1, counts.dtype), jnp.cumsum(counts)]).astype(jnp.int32)
    layers = [list(layer) for layer in pool]
    # Jitted to be traced and lowered once for all layers of a segment; XLA inlines it.
    put = jax.jit(_put)
    for s in range(len(sizes)):

        def write(i: jax.Array, arrays: list, base: int = int(starts[s])) -> list:
            t = order[i]
            return [put(kv, kv_new, t, row[t] - base, offset[t]) for kv, kv_new in zip(arrays, new, strict=True)]

        written = lax.fori_loop(bounds[s], bounds[s + 1], write, [layer[s] for layer in layers])
        for layer, arrays in zip(layers, written, strict=True):
            layer[s] = arrays
    return tuple(tuple(layer) for layer in layers)


def _put(
    pages: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    t: jax.Array,
    row: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write token t's key and value of one layer at (row, offset)."""
    keys, values = pages
    k = lax.dynamic_index_in_dim(new[0], t, 0)[..., None].astype(keys.dtype)
    v = lax.dynamic_index_in_dim(new[1], t, 0)[:, :, None, :].astype(values.dtype)
    return (
        lax.dynamic_update_slice(keys, k, (row, 0, 0, offset)),
        lax.dynamic_update_slice(values, v, (row, 0, offset, 0)),
    )
