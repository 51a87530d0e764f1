"""The attention kernel alone: its numbers against XLA's attention in float32, and its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu import costs, forests
from jaxspec.bench.gpu.card import Card, chained
from jaxspec.bench.gpu.plan import KERNELS
from jaxspec.compilation import compile_ahead
from jaxspec.kernels import tree_attention
from jaxspec.step import work_items
from jaxspec.step.attention import Earlier, attend
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.gpu import tile_rows
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache
from jaxspec.step.packing import SamplingInputs, Tree, pack
from jaxspec.step.quantization import quantize
from jaxspec.step.tree import ancestors

#: Layers of the cache, and the one that is read.
_LAYERS, _LAYER = 2, 1
#: The largest relative root-mean-square error of a correct kernel. In bfloat16 rounding the output alone gives 1.7e-3,
#: and the interpreted kernel has up to 3.4e-3; TF32 instead of float32 would give more than 1e-4.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3}


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All inputs of attention, in float32 but for an INT8 cache."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cache: AnyKVCache
    batch: Batch
    earlier: Earlier | None
    nodes: int

    def floats(self, dtype: str) -> tuple[Any, ...]:
        """Queries, keys, values, cache and earlier levels with the floating-point arrays in `dtype`."""
        parts = self.q, self.k, self.v, self.cache, self.earlier
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, parts)


def error(card: Card, case: str, dtype: str) -> dict[str, Any]:
    """Errors of the kernel's output for inputs of `dtype`, relative to the root mean square of XLA's for the same
    values in float32; and those of XLA's for inputs of `dtype`."""
    given = KERNELS[case]
    inputs, window, rows = _inputs(given), given.get("window"), given["rows"]
    group, batch, layer = given["heads"] // given["kv"], inputs.batch, jnp.int32(_LAYER)

    def kernel(q: Any, k: Any, v: Any, cache: AnyKVCache, earlier: Earlier | None, batch: Batch) -> jax.Array:
        items = work_items.plan(batch, group, rows, given["page"])
        qkv = jnp.concatenate([q, k, v], 1)
        return tree_attention.attend(
            qkv, k.shape[1], cache, layer, batch, items, rows, window, earlier, interpret=card.interpret
        )  # fmt: skip

    def plain(q: Any, k: Any, v: Any, cache: AnyKVCache, earlier: Earlier | None, batch: Batch) -> jax.Array:
        return attend(q, k, v, cache, layer, batch, ancestors(batch.subtree), window, earlier)

    rounded = inputs.floats(dtype)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.dtype(dtype) else x, rounded)
    wanted = _output(plain, exact, batch, inputs.nodes)
    found = {"kernel": _output(kernel, rounded, batch, inputs.nodes)}
    if dtype != "float32":
        found["xla"] = _output(plain, rounded, batch, inputs.nodes)
    scale = float(np.sqrt(np.mean(wanted**2)))
    out: dict[str, Any] = {"case": case, "dtype": dtype, "bound": BOUNDS[dtype]}
    for name, values in found.items():
        away = values - wanted
        finite = bool(np.isfinite(away).all())  # JSON has no NaN
        out[f"{name}_rms"] = float(np.sqrt(np.mean(away**2))) / scale if finite else None
        out[f"{name}_max"] = float(np.abs(away).max()) / scale if finite else None
    return out


def _output(function: Any, arguments: tuple[Any, ...], batch: Batch, nodes: int) -> np.ndarray:
    out = compile_ahead(function, *arguments, batch)(*arguments, batch)
    return np.asarray(out.astype(jnp.float32), np.float64)[:nodes]


def _inputs(given: dict[str, Any]) -> _Inputs:
    rng = np.random.default_rng(len(given["trees"]))
    heads, kv, dim, page, slots = (given.get(name) for name in ("heads", "kv", "dim", "page", "slots"))
    assert heads and kv and dim and page
    batch, pages, nodes = _levels(given, page) if slots else _forest(rng, given, page)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    keys, values = normal(_LAYERS, pages, kv, dim, page), normal(_LAYERS, pages, kv, page, dim)
    none = jnp.zeros((0, page, 1))
    if given.get("int8"):
        k, v, opened = quantize(keys, -1), quantize(values, -2), jnp.zeros((_LAYERS, 1, kv, dim, page))
        cache: AnyKVCache = Int8KVCache(
            k.codes, v.codes, none, k.scale, k.zero, v.scale, v.zero, opened, opened.swapaxes(-1, -2)
        )
    else:
        cache = _poisoned(KVCache(keys, values, none), batch)
    earlier = None
    if slots:
        requests, width = len(given["trees"]), given["trees"][0][0]
        shape = _LAYERS, requests, slots, kv, dim
        earlier = Earlier(normal(*shape), normal(*shape), jnp.asarray(rng.random((requests, width, slots)) < 0.3))
    tokens = batch.token.shape[0]
    return _Inputs(normal(tokens, heads, dim), normal(tokens, kv, dim), normal(tokens, kv, dim), cache, batch, earlier,
                   nodes)  # fmt: skip


def _forest(rng: np.random.Generator, given: dict[str, Any], page: int) -> tuple[Batch, int, int]:
    """A batch of random trees over random pages, the number of pages and of nodes."""
    needed = [-(-(committed + count) // page) for count, committed in given["trees"]]
    free = rng.permutation(sum(needed)).astype(np.int32)
    trees = []
    for (count, committed), own in zip(given["trees"], np.split(free, np.cumsum(needed)[:-1]), strict=True):
        if given.get("chains"):
            trees.append(Tree.chain([1] * count, committed, own, SamplingInputs()))
        else:
            trees.append(forests.tree(forests.random(rng, count), [1] * count, committed, own, range(count)))
    nodes = sum(count for count, _ in given["trees"])
    return _packed(trees, nodes + 3, max(needed), page), sum(needed), nodes


def _levels(given: dict[str, Any], page: int) -> tuple[Batch, int, int]:
    """A batch of draft nodes that share their request's pages, each a tree of its own."""
    trees, start = [], 0
    for count, committed in given["trees"]:
        pages = np.arange(start, start + -(-(committed + 1) // page), dtype=np.int32)
        trees += [Tree.chain([1], committed, pages, SamplingInputs()) for _ in range(count)]
        start += len(pages)
    return _packed(trees, len(trees), start, page), start, len(trees)


def _packed(trees: list[Tree], tokens: int, pages: int, page: int) -> Batch:
    shape = BatchShape(tokens, tokens, len(trees), pages)
    return Batch.unpack(jnp.asarray(pack(trees, [shape], BatchBuffers([shape]), page).buffer), shape)


def _poisoned(cache: KVCache, batch: Batch) -> KVCache:
    """The cache with NaN in all positions that no request has committed."""
    page = cache.keys.shape[-1]
    there = np.zeros((cache.keys.shape[1], page), bool)
    for row, committed in zip(np.asarray(batch.table), np.asarray(batch.committed), strict=True):
        for i in range(-(-int(committed) // page)):
            there[row[i]] = np.arange(page) < committed - i * page
    mask = jnp.asarray(there)[None, :, None]
    return cache._replace(
        keys=jnp.where(mask[..., None, :], cache.keys, jnp.nan),
        values=jnp.where(mask[..., None], cache.values, jnp.nan),
    )


def time_alone(card: Card, batch: int, nodes: int, context: int, rows: int | None) -> dict[str, Any]:
    """The attention of all layers of a step, without the matrix products between them. rows: of a tile; None: those
    that a step of this size takes."""
    c, page, dtype = card.config, 32, card.dtype
    committed, pages = context - nodes, -(-context // page)
    parents = forests.balanced(nodes)
    trees = [
        forests.tree(parents, [1] * nodes, committed, own, range(nodes))
        for own in np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    ]
    tokens = batch * nodes
    shape = BatchShape(tokens, tokens, batch, pages)
    buffer = jnp.asarray(pack(trees, [shape], BatchBuffers([shape]), page).buffer)
    cache = card.fill(KVCache.zeros(c, batch * pages, page, dtype))
    chosen, group = rows or tile_rows(tokens, dtype), c.num_heads // c.num_kv_heads

    def layers(q: jax.Array, k: jax.Array, cache: KVCache, buffer: jax.Array) -> jax.Array:
        unpacked = Batch.unpack(buffer, shape)
        items = work_items.plan(unpacked, group, chosen, page)

        @jax.jit  # equal layers are traced once
        def one(q: jax.Array, layer: jax.Array) -> jax.Array:
            qkv = jnp.concatenate([q, k, k], 1)
            return tree_attention.attend(
                qkv, c.num_kv_heads, cache, layer, unpacked, items, chosen, interpret=card.interpret
            )  # fmt: skip

        for layer in range(c.num_layers):
            q = one(q, jnp.int32(layer))
        return q

    q, k = (jax.random.normal(jax.random.key(i), (tokens, heads, c.head_dim), dtype)
            for i, heads in enumerate((c.num_heads, c.num_kv_heads)))  # fmt: skip
    program = compile_ahead(layers, q, k, cache, buffer)
    times = chained(
        lambda: program(q, k, cache, buffer), jax.block_until_ready, card.sizes.chain, card.sizes.repeats
    )  # fmt: skip
    moved = batch * committed * costs.position_bytes(c, card.itemsize)
    return {"batch": batch, "nodes": nodes, "context": context, "rows": chosen, "bytes": moved, **times}
