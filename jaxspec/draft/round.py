"""One draft round on the device: compute KV for the uncached tokens, then grow a tree.

The first part is a step like the target's: each request's tokens since its watermark run as a chain through the
drafter's layers, and their KV goes into the drafter's pool. From each chain's last token a tree grows level by level, W
nodes per request and level (`growth`). Its nodes attend to the pool and to their ancestors; their KV is discarded.
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
from jaxspec.step.ahead import Chains, NewTokens, catch_up
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.layers import Layers
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.tree import ancestors


class Staged(NamedTuple):
    """Target features that were copied to the drafter's own device."""

    rows: jax.Array  # [S, TAPS * hidden]
    origin: jax.Array | np.ndarray  # [T] int32: the row with the feature before each node; S if there is none


class Drafted(NamedTuple):
    """Results of a round. `chains`: the first nodes of all levels, for a step that is launched before the host has read
    them; None in programs that follow no step under way."""

    out: jax.Array  # [3, R, depth, W] int32 as `_Tree.out`
    chains: Chains | None


#: The target's feature pool `[pages, page_size, TAPS * hidden]`, or rows copied from it.
Features = jax.Array | Staged
#: (weights, pool and drawn [donated], features, buffer, levels, before) -> (pool, drawn, result). `before`: the new
#: tokens of the step under way; None in programs that follow none.
Round = Callable[
    [tuple[jax.Array, ...], KVCache, DraftDistributions, Features, jax.Array, jax.Array, NewTokens | None],
    tuple[KVCache, DraftDistributions, Drafted],
]
#: Small arguments of a round that are new arrays in every run: buffer, levels, before.
MOVING = 4, 5, 6


class _Tree(NamedTuple):
    """A tree under construction: its latest level, and all levels' KV and output.

    R requests, W nodes per level, S = depth * W slots.
    """

    token: jax.Array  # [R, W] int32
    logprob: jax.Array  # [R, W] float32, of the path from the root
    condition: jax.Array  # [R, W, hidden]: the drafter's own output at the parent
    seen: jax.Array  # [R, W, S] bool: slots of the ancestors
    keys: jax.Array  # [layers, R, S, kv_heads, head_dim]
    values: jax.Array
    out: jax.Array  # [3, R, depth, W] int32: token, parent's index in its level, bits of logprob


def make_round(
    graph: nnx.GraphDef[DraftDecoder], treedef: Any, shape: BatchShape, layers: Layers, growth: Growth, depth: int
) -> Round:
    """The pure round function of one batch shape (one logit row per tree), to be compiled with pool and drawn donated.

    Its argument `levels` [] int32 is the number of levels to grow, at most `depth`; the first is always grown. Levels
    not grown are zeros.
    """

    def one_round(
        leaves: tuple[jax.Array, ...], kv_cache: KVCache, drawn: DraftDistributions, features: Features,
        buffer: jax.Array, levels: jax.Array, before: NewTokens | None = None,
    ) -> tuple[KVCache, DraftDistributions, Drafted]:  # fmt: skip
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        batch = Batch.unpack(buffer, shape)
        batch = batch if before is None else catch_up(batch, before)
        page_size = kv_cache.keys.shape[-1]
        conditions = model.condition(_features_before(model, features, batch, page_size))
        x = model.embed(batch.token, batch.position, conditions)
        x, new, _ = layers.run(model, x, kv_cache, batch, ancestors(batch.subtree))
        kv_cache = layers.commit(kv_cache, new, batch, batch.known > 0, x)
        output = model.finish(x).at[batch.logit_node].get(mode="clip")  # [R, hidden]
        kv_cache, drawn, out = _grow(model, kv_cache, drawn, batch, output, layers, growth, depth, levels)
        chains = None if before is None else jnp.pad(out[0, :, :, 0], ((0, len(before.length) - shape.trees), (0, 0)))
        return kv_cache, drawn, Drafted(out, chains)

    return one_round


def _features_before(model: DraftDecoder, features: Features, batch: Batch, page_size: int) -> jax.Array:
    """The target's features at the position before each node `[T, TAPS * hidden]`; zeros at position 0."""
    if not model.conditioned:
        return jnp.zeros((batch.token.shape[0], 0))
    if isinstance(features, Staged):
        return features.rows.at[features.origin].get(mode="fill", fill_value=0)
    before = jnp.maximum(batch.position - 1, 0)
    page = batch.table.at[batch.tree, before // page_size].get(mode="clip")
    found = features.at[page, before % page_size].get(mode="clip")
    return jnp.where((batch.position > 0)[:, None], found, 0)


def _grow(
    model: DraftDecoder, kv_cache: KVCache, drawn: DraftDistributions, batch: Batch, output: jax.Array, layers: Layers,
    growth: Growth, depth: int, levels: jax.Array,
) -> tuple[KVCache, DraftDistributions, jax.Array]:  # fmt: skip
    """Grow trees from the chains' last tokens with outputs `[R, hidden]`. Returns (pool, drawn, `_Tree.out`).

    The loop carries the pool although it does not change it: XLA would copy a pool that is only read.
    """
    c, r, width = model.config, batch.first.shape[0], growth.width
    slots = depth * width
    last = batch.position.at[batch.logit_node].get(mode="clip")

    def next_level(
        output: jax.Array, path: jax.Array, level: jax.Array | int, drawn: DraftDistributions
    ) -> tuple[Level, jax.Array, DraftDistributions]:
        """The level below nodes with outputs `[R, N, hidden]` and path log-probabilities `[R, N]`; its tokens `[R, W]`
        int32; `drawn` with what they were drawn from."""
        n = output.shape[1]
        logits = model.logits(output.reshape(r * n, -1)).reshape(r, n, -1)
        new = growth.grow(logits, path, jnp.asarray(level), batch, last + 1 + level)
        if growth.draws:
            rows = lax.dynamic_update_slice(drawn.logits, tempered(logits, batch)[:, None], (0, level, 0, 0))
            drawn = drawn._replace(logits=rows)
        return new, model.vocab[...][new.column].astype(jnp.int32), drawn

    first, token, drawn = next_level(output[:, None], jnp.zeros((r, 1)), 0, drawn)
    kv = jnp.zeros((c.num_layers, r, slots, c.num_kv_heads, c.head_dim), kv_cache.keys.dtype)
    out = jnp.zeros((3, r, depth, width), jnp.int32)
    tree = _Tree(
        token, first.logprob, jnp.broadcast_to(output[:, None], (r, width, output.shape[-1])),
        jnp.zeros((r, width, slots), bool), kv, kv, _write(out, 0, token, first),
    )  # fmt: skip
    # Every node is a tree of its own. Padding comes last, as the kernels require, because padding requests do.
    real = batch.nodes > 0
    index = jnp.arange(r * width, dtype=jnp.int32)
    nodes = batch._replace(
        subtree=jnp.ones_like(index),
        tree=index,
        first=index,
        nodes=jnp.repeat(real.astype(jnp.int32), width),
        committed=jnp.repeat(jnp.where(real, last + 1, 0), width),
        table=jnp.repeat(batch.table, width, axis=0),
    )
    only_self = jnp.eye(r * width, dtype=bool)

    def grow(
        j: jax.Array, state: tuple[KVCache, DraftDistributions, _Tree]
    ) -> tuple[KVCache, DraftDistributions, _Tree]:
        """Run the nodes of level j - 1 and grow level j."""
        kv_cache, drawn, tree = state
        at = nodes._replace(position=jnp.repeat(last + j, width))
        x = model.embed(tree.token.reshape(-1), at.position, tree.condition.reshape(r * width, -1))
        x, (k, v), _ = layers.run(model, x, kv_cache, at, only_self, Earlier(tree.keys, tree.values, tree.seen))
        output = model.finish(x).reshape(r, width, -1)
        start = (j - 1) * width

        def put(kv: jax.Array, new: jax.Array) -> jax.Array:
            """`kv [layers, R, S, …]` with this level's slots filled."""
            new = new.reshape(c.num_layers, r, width, c.num_kv_heads, c.head_dim)
            return lax.dynamic_update_slice_in_dim(kv, new, start, 2)

        new, token, drawn = next_level(output, tree.logprob, j, drawn)
        parent = new.parent[..., None]
        own_slot = jnp.arange(slots) == (start + jnp.arange(width))[:, None]  # [W, S]
        return kv_cache, drawn, _Tree(
            token, new.logprob, jnp.take_along_axis(output, parent, 1),
            jnp.take_along_axis(tree.seen | own_slot, parent, 1), put(tree.keys, k), put(tree.values, v),
            _write(tree.out, j, token, new),
        )  # fmt: skip

    kv_cache, drawn, tree = lax.fori_loop(1, levels, grow, (kv_cache, drawn, tree))
    return kv_cache, drawn, tree.out


def _write(out: jax.Array, level: jax.Array | int, token: jax.Array, new: Level) -> jax.Array:
    """`_Tree.out` with this level's nodes written."""
    row = jnp.stack([token, new.parent.astype(jnp.int32), lax.bitcast_convert_type(new.logprob, jnp.int32)])
    return lax.dynamic_update_slice_in_dim(out, row[:, :, None], level, 2)
