"""The step of the target model: one jitted function for prefill, decoding and verification of token trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.llama import Decoder
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.layers import Layers
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import Drawn
from jaxspec.step.sampler import Logprobs, sample
from jaxspec.step.tree import accept, ancestors

M = TypeVar("M", bound=nnx.Module)

#: (weight leaves, pool [donated], penalty table, what drafts were drawn from, buffer) -> (pool, result)
Step = Callable[[tuple[jax.Array, ...], AnyKVCache, PenaltyTable, Drawn, jax.Array], tuple[AnyKVCache, "StepResult"]]


class StepResult(NamedTuple):
    """`decision [C + T]` int32 is all the host reads as a rule: each choice, then 1 for each accepted node."""

    decision: jax.Array
    logprobs: Logprobs


def split(model: M) -> tuple[nnx.GraphDef[M], Any, tuple[jax.Array, ...]]:
    """Graph, tree definition and flat weights of a model; flat, because every leaf and level costs dispatch time."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return graph, treedef, tuple(leaves)


def make_step(graph: nnx.GraphDef[Decoder], treedef: Any, shape: BatchShape, layers: Layers) -> Step:
    """The pure step function of one batch shape, to be compiled with its pool donated."""

    def step(
        leaves: tuple[jax.Array, ...], pool: AnyKVCache, table: PenaltyTable, drawn: Drawn, buffer: jax.Array
    ) -> tuple[AnyKVCache, StepResult]:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        batch = Batch.unpack(buffer, shape)
        mask = ancestors(batch.subtree)
        x, new = layers.run(model, model.embed(batch.token), pool, batch, mask)
        features = model.finish(x)
        logits = model.logits(features.at[batch.logit_node].get(mode="clip"))
        sampled, logprobs = sample(logits, batch, table, drawn, mask)
        accepted = accept(batch.token, batch.known, batch.parent_row, sampled, mask)
        pool = layers.commit(pool, new, batch, accepted, x).keep(features, batch.slot, accepted)
        return pool, StepResult(jnp.concatenate([sampled, accepted.astype(jnp.int32)]), logprobs)

    return step
