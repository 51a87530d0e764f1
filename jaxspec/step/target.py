"""The step of the target model: one jitted function for prefill, decoding and verification of token trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.llama import Decoder, Rope, window_of
from jaxspec.step.attention import Committed, merge, within_batch
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.choose import Logprobs, choose
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.pool import Pool, commit
from jaxspec.step.tree import accept, ancestors

#: (weight leaves, pool [donated], penalty table, buffer) -> (pool, result)
Step = Callable[[tuple[jax.Array, ...], Pool, PenaltyTable, jax.Array], tuple[Pool, "StepResult"]]


class StepResult(NamedTuple):
    """`decision [C + T]` int32 is all the host reads as a rule: each choice, then 1 for each accepted node."""

    decision: jax.Array
    logprobs: Logprobs


def split(model: Decoder) -> tuple[nnx.GraphDef[Decoder], Any, tuple[jax.Array, ...]]:
    """Graph, tree definition and flat weights of a model; flat, because every leaf and level costs dispatch time."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return graph, treedef, tuple(leaves)


def make_step(graph: nnx.GraphDef[Decoder], treedef: Any, shape: BatchShape, page_size: int) -> Step:
    """The pure step function of one batch shape, to be compiled with its pool donated."""

    def step(
        leaves: tuple[jax.Array, ...], pool: Pool, table: PenaltyTable, buffer: jax.Array
    ) -> tuple[Pool, StepResult]:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        c = model.config
        batch = Batch.unpack(buffer, shape)
        mask = ancestors(batch.subtree)
        groups = c.num_heads // c.num_kv_heads

        def layer_of(window: int | None) -> Callable:
            committed = Committed(shape, batch, page_size, window)
            seen = mask
            if window is not None:
                seen = mask & (batch.position[:, None] - batch.position[None, :] < window)

            def run(block_state: nnx.State, kv: tuple, x: jax.Array, rope: Rope, graph: nnx.GraphDef) -> tuple:
                new: list[tuple[jax.Array, jax.Array]] = []

                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    new.append((k, v))
                    q = q.reshape(-1, c.num_kv_heads, groups, c.head_dim).transpose(1, 0, 2, 3) * c.head_dim**-0.5
                    part = merge(committed(q, kv), within_batch(q, k, v, seen))
                    out = part.out / part.total[..., None]
                    return out.transpose(1, 0, 2, 3).reshape(-1, c.num_heads, c.head_dim)

                x = nnx.merge(graph, block_state)(x, rope, attend)
                return x, new[0]

            # Jitted so that thirty equal layers are traced and lowered once; XLA inlines the calls.
            return jax.jit(run, static_argnames="graph")

        runs = {window: layer_of(window) for window in {window_of(c, i) for i in range(c.num_layers)}}
        x, rope, new = model.embed(batch.token), model.rope(batch.position), []
        for i, block in enumerate(model.layers):
            block_graph, block_state = nnx.split(block)
            x, kv = runs[window_of(c, i)](block_state, pool[i], x, rope, graph=block_graph)
            new.append(kv)
        logits = model.logits(x.at[batch.choice_node].get(mode="clip"))
        choice, logprobs = choose(logits, batch, table, mask)
        accepted = accept(batch.token, batch.known, batch.parent_choice, choice, mask)
        pool = commit(pool, new, batch.slot, accepted)
        return pool, StepResult(jnp.concatenate([choice, accepted.astype(jnp.int32)]), logprobs)

    return step
