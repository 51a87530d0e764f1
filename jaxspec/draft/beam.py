"""One round of drafting on the device: catch up with what was accepted, then expand a beam.

The catch-up is a step like any other: each request's tokens since its watermark, as a chain, through the drafter's
layers into its pool. From each chain's last token a beam grows: level by level the W most likely nodes of a request (by
the probability of their path) are kept, and the next level hangs on them. Nodes of the beam attend to the pool and to
their ancestors; their KV is dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.models.draft import DraftDecoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.choose import argmax
from jaxspec.step.layers import Layers
from jaxspec.step.pool import Pool
from jaxspec.step.tree import ancestors

#: (weights, pool [donated], the target's features, buffer, levels) -> (pool, `[3, R, depth, W]` int32)
Round = Callable[[tuple[jax.Array, ...], Pool, jax.Array, jax.Array, jax.Array], tuple[Pool, jax.Array]]


class _Beam(NamedTuple):
    """The level reached. R requests, W nodes each, S = depth * W slots."""

    token: jax.Array  # [R, W] int32
    logprob: jax.Array  # [R, W] of the path
    feature: jax.Array  # [R, W, hidden]: the drafter's own, at the parent
    seen: jax.Array  # [R, W, S] bool: slots of the ancestors
    keys: jax.Array  # [layers, R, S, kv_heads, head_dim]
    values: jax.Array
    out: jax.Array  # [3, R, depth, W]: token, parent's place in its level, bits of logprob


def make_round(
    graph: nnx.GraphDef[DraftDecoder], treedef: Any, shape: BatchShape, layers: Layers, width: int, depth: int
) -> Round:
    """The pure function of one batch shape (whose choices are its trees), to be compiled with its pool donated.

    `levels` [] int32 (up to depth) is how many the beam grows, the first of them always. Unreached levels are zeros.
    """

    def one_round(
        leaves: tuple[jax.Array, ...], pool: Pool, features: jax.Array, buffer: jax.Array, levels: jax.Array
    ) -> tuple[Pool, jax.Array]:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        batch = Batch.unpack(buffer, shape)
        page_size = pool.keys.shape[-1]
        x = model.embed(batch.token, _features_before(model, features, batch, page_size))
        x, new = layers.run(model, x, pool, batch, ancestors(batch.subtree))
        pool = layers.commit(pool, new, batch.slot, batch.known > 0, x)
        own = model.finish(x).at[batch.choice_node].get(mode="clip")  # [R, hidden]
        return _grow(model, pool, batch, own, layers, width, depth, levels)

    return one_round


def _features_before(model: DraftDecoder, features: jax.Array, batch: Batch, page_size: int) -> jax.Array:
    """The target's feature at the position before each node `[T, hidden]`; zeros at position 0."""
    if not model.conditioned:
        return jnp.zeros((batch.token.shape[0], model.config.hidden_size))
    before = jnp.maximum(batch.position - 1, 0)
    page = batch.table.at[batch.tree, before // page_size].get(mode="clip")
    found = features.at[page, before % page_size].get(mode="clip")
    return jnp.where((batch.position > 0)[:, None], found, 0)


def _grow(
    model: DraftDecoder, pool: Pool, batch: Batch, own: jax.Array, layers: Layers, width: int, depth: int,
    levels: jax.Array,
) -> tuple[Pool, jax.Array]:  # fmt: skip
    """The pool, unchanged, goes through the loop and out again: were it only read there, XLA would copy it."""
    c, r, slots = model.config, batch.first.shape[0], depth * width
    logprob, token = _best(model, own[:, None], jnp.zeros((r, 1)), width)
    token, logprob = token[:, 0], logprob[:, 0]
    kv = jnp.zeros((c.num_layers, r, slots, c.num_kv_heads, c.head_dim))
    out = jnp.zeros((3, r, depth, width), jnp.int32)
    beam = _Beam(
        token, logprob, jnp.broadcast_to(own[:, None], (r, width, own.shape[-1])),
        jnp.zeros((r, width, slots), bool), kv, kv, _write(out, 0, token, jnp.zeros_like(token), logprob),
    )  # fmt: skip
    last = batch.position.at[batch.choice_node].get(mode="clip")
    real = batch.nodes > 0  # requests that are padding come last, so their nodes do, as the kernel wants it
    number = jnp.arange(r * width, dtype=jnp.int32)
    level = batch._replace(
        subtree=jnp.ones_like(number),
        tree=number,
        first=number,
        nodes=jnp.repeat(real.astype(jnp.int32), width),
        committed=jnp.repeat(jnp.where(real, last + 1, 0), width),
        table=jnp.repeat(batch.table, width, axis=0),
    )
    alone = jnp.eye(r * width, dtype=bool)

    def grow(j: jax.Array, state: tuple[Pool, _Beam]) -> tuple[Pool, _Beam]:
        """From level j to level j + 1; levels count from 1."""
        pool, beam = state
        at = level._replace(position=jnp.repeat(last + j, width))
        x = model.embed(beam.token.reshape(-1), beam.feature.reshape(r * width, -1))
        x, (k, v) = layers.run(model, x, pool, at, alone, Earlier(beam.keys, beam.values, beam.seen))
        own = model.finish(x).reshape(r, width, -1)
        first = (j - 1) * width

        def put(slots_of: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(c.num_layers, r, width, c.num_kv_heads, c.head_dim)
            return lax.dynamic_update_slice_in_dim(slots_of, new, first, 2)

        logprob, token = _best(model, own, beam.logprob, width)  # [R, W, W]: children of each
        logprob, place = _top(logprob.reshape(r, width * width), width)
        token = jnp.take_along_axis(token.reshape(r, width * width), place, 1)
        parent = place // width
        mine = jnp.arange(slots) == (first + jnp.arange(width))[:, None]  # [W, S]
        return pool, _Beam(
            token, logprob, jnp.take_along_axis(own, parent[..., None], 1),
            jnp.take_along_axis(beam.seen | mine, parent[..., None], 1), put(beam.keys, k), put(beam.values, v),
            _write(beam.out, j, token, parent, logprob),
        )  # fmt: skip

    pool, beam = lax.fori_loop(1, levels, grow, (pool, beam))
    return pool, beam.out


def _write(
    out: jax.Array, level: jax.Array | int, token: jax.Array, parent: jax.Array, logprob: jax.Array
) -> jax.Array:
    row = jnp.stack([token, parent.astype(jnp.int32), lax.bitcast_convert_type(logprob, jnp.int32)])
    return lax.dynamic_update_slice_in_dim(out, row[:, :, None], level, 2)


def _best(model: DraftDecoder, own: jax.Array, path: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The most likely children of each node: own `[R, N, hidden]`, path `[R, N]` -> log-probability of the path to each
    child, and its token, `[R, N, W]`."""
    r, n, hidden = own.shape
    logits = model.logits(own.reshape(r * n, hidden))
    logprob, place = _top(logits, width)
    logprob = logprob - jax.nn.logsumexp(logits, -1, keepdims=True) + path.reshape(-1, 1)
    return logprob.reshape(r, n, width), model.vocab[...][place].reshape(r, n, width).astype(jnp.int32)


def _top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row, descending, `[N, V]` -> values and places `[N, count]`; count is small.

    One maximum after another: a sort of thousands takes XLA on CPU a hundred times as long.
    """
    values, places = [], []
    for _ in range(count):
        place = argmax(x)
        values.append(jnp.take_along_axis(x, place[:, None], 1)[:, 0])
        places.append(place)
        x = jnp.where(jnp.arange(x.shape[1]) == place[:, None], -jnp.inf, x)
    return jnp.stack(values, 1), jnp.stack(places, 1)
