"""One round of drafting on the device: catch up with what was accepted, then grow a tree.

The catch-up is a step like any other: each request's tokens since its watermark, as a chain, through the drafter's
layers into its pool. From each chain's last token a tree grows, level by level W nodes a request (`growth`). Its nodes
attend to the pool and to their ancestors; their KV is dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.draft.growth import Growth, Level, tempered
from jaxspec.models.drafter import DraftDecoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.layers import Layers
from jaxspec.step.rejection import Drawn
from jaxspec.step.tree import ancestors


class Staged(NamedTuple):
    """The target's features where its pool is on another device."""

    rows: jax.Array  # [S, hidden]
    origin: jax.Array | np.ndarray  # [T] int32: the row with the feature before each node; S where there is none


#: The target's feature pool `[pages, page_size, hidden]`, or what was brought over from it.
Features = jax.Array | Staged
#: (weights, pool and drawn [donated], features, buffer, levels) -> (pool, drawn, `[3, R, depth, W]` int32)
Round = Callable[
    [tuple[jax.Array, ...], KVCache, Drawn, Features, jax.Array, jax.Array], tuple[KVCache, Drawn, jax.Array]
]


class _Tree(NamedTuple):
    """The level reached. R requests, W nodes each, S = depth * W slots."""

    token: jax.Array  # [R, W] int32
    logprob: jax.Array  # [R, W] of the path
    feature: jax.Array  # [R, W, hidden]: the drafter's own, at the parent
    seen: jax.Array  # [R, W, S] bool: slots of the ancestors
    keys: jax.Array  # [layers, R, S, kv_heads, head_dim]
    values: jax.Array
    out: jax.Array  # [3, R, depth, W]: token, parent's place in its level, bits of logprob


def make_round(
    graph: nnx.GraphDef[DraftDecoder], treedef: Any, shape: BatchShape, layers: Layers, growth: Growth, depth: int
) -> Round:
    """The pure function of one batch shape (whose choices are its trees), to be compiled with its pool donated.

    `levels` [] int32 (up to depth) is how many the tree grows, the first of them always. Unreached levels are zeros.
    """

    def one_round(
        leaves: tuple[jax.Array, ...], pool: KVCache, drawn: Drawn, features: Features, buffer: jax.Array,
        levels: jax.Array,
    ) -> tuple[KVCache, Drawn, jax.Array]:  # fmt: skip
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        batch = Batch.unpack(buffer, shape)
        page_size = pool.keys.shape[-1]
        x = model.embed(batch.token, _features_before(model, features, batch, page_size))
        x, new = layers.run(model, x, pool, batch, ancestors(batch.subtree))
        pool = layers.commit(pool, new, batch, batch.known > 0, x)
        own = model.finish(x).at[batch.logit_node].get(mode="clip")  # [R, hidden]
        return _grow(model, pool, drawn, batch, own, layers, growth, depth, levels)

    return one_round


def _features_before(model: DraftDecoder, features: Features, batch: Batch, page_size: int) -> jax.Array:
    """The target's feature at the position before each node `[T, hidden]`; zeros at position 0."""
    if not model.conditioned:
        return jnp.zeros((batch.token.shape[0], model.config.hidden_size))
    if isinstance(features, Staged):
        return features.rows.at[features.origin].get(mode="fill", fill_value=0)
    before = jnp.maximum(batch.position - 1, 0)
    page = batch.table.at[batch.tree, before // page_size].get(mode="clip")
    found = features.at[page, before % page_size].get(mode="clip")
    return jnp.where((batch.position > 0)[:, None], found, 0)


def _grow(
    model: DraftDecoder, pool: KVCache, drawn: Drawn, batch: Batch, own: jax.Array, layers: Layers, growth: Growth,
    depth: int, levels: jax.Array,
) -> tuple[KVCache, Drawn, jax.Array]:  # fmt: skip
    """The pool, unchanged, goes through the loop and out again: were it only read there, XLA would copy it."""
    c, r, width = model.config, batch.first.shape[0], growth.width
    slots = depth * width
    last = batch.position.at[batch.logit_node].get(mode="clip")

    def below(own: jax.Array, path: jax.Array, level: jax.Array | int, drawn: Drawn) -> tuple[Level, jax.Array, Drawn]:
        """The level below nodes with `own [R, N, hidden]` and `path [R, N]`; its tokens `[R, W]` int32."""
        n = own.shape[1]
        logits = model.logits(own.reshape(r * n, -1)).reshape(r, n, -1)
        new = growth.grow(logits, path, jnp.asarray(level), batch, last + 1 + level)
        if growth.draws:
            rows = lax.dynamic_update_slice(drawn.logits, tempered(logits, batch)[:, None], (0, level, 0, 0))
            drawn = drawn._replace(logits=rows)
        return new, model.vocab[...][new.column].astype(jnp.int32), drawn

    first, token, drawn = below(own[:, None], jnp.zeros((r, 1)), 0, drawn)
    kv = jnp.zeros((c.num_layers, r, slots, c.num_kv_heads, c.head_dim))
    out = jnp.zeros((3, r, depth, width), jnp.int32)
    tree = _Tree(
        token, first.logprob, jnp.broadcast_to(own[:, None], (r, width, own.shape[-1])),
        jnp.zeros((r, width, slots), bool), kv, kv, _write(out, 0, token, first),
    )  # fmt: skip
    real = batch.nodes > 0  # requests that are padding come last, so their nodes do, as the kernel wants it
    number = jnp.arange(r * width, dtype=jnp.int32)
    nodes = batch._replace(
        subtree=jnp.ones_like(number),
        tree=number,
        first=number,
        nodes=jnp.repeat(real.astype(jnp.int32), width),
        committed=jnp.repeat(jnp.where(real, last + 1, 0), width),
        table=jnp.repeat(batch.table, width, axis=0),
    )
    alone = jnp.eye(r * width, dtype=bool)

    def grow(j: jax.Array, state: tuple[KVCache, Drawn, _Tree]) -> tuple[KVCache, Drawn, _Tree]:
        """From level j - 1 to level j."""
        pool, drawn, tree = state
        at = nodes._replace(position=jnp.repeat(last + j, width))
        x = model.embed(tree.token.reshape(-1), tree.feature.reshape(r * width, -1))
        x, (k, v) = layers.run(model, x, pool, at, alone, Earlier(tree.keys, tree.values, tree.seen))
        own = model.finish(x).reshape(r, width, -1)
        start = (j - 1) * width

        def put(slots_of: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(c.num_layers, r, width, c.num_kv_heads, c.head_dim)
            return lax.dynamic_update_slice_in_dim(slots_of, new, start, 2)

        new, token, drawn = below(own, tree.logprob, j, drawn)
        parent = new.parent[..., None]
        mine = jnp.arange(slots) == (start + jnp.arange(width))[:, None]  # [W, S]
        return pool, drawn, _Tree(
            token, new.logprob, jnp.take_along_axis(own, parent, 1),
            jnp.take_along_axis(tree.seen | mine, parent, 1), put(tree.keys, k), put(tree.values, v),
            _write(tree.out, j, token, new),
        )  # fmt: skip

    pool, drawn, tree = lax.fori_loop(1, levels, grow, (pool, drawn, tree))
    return pool, drawn, tree.out


def _write(out: jax.Array, level: jax.Array | int, token: jax.Array, new: Level) -> jax.Array:
    row = jnp.stack([token, new.parent.astype(jnp.int32), lax.bitcast_convert_type(new.logprob, jnp.int32)])
    return lax.dynamic_update_slice_in_dim(out, row[:, :, None], level, 2)
