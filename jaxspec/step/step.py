"""One step of the target model: a single pure function for prefill, decode and verification of token trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Int32, UInt32

from jaxspec.models.decoder import Decoder
from jaxspec.models.drafter import features_of, tapped_layers
from jaxspec.step.ahead import Chains, NewTokens, new_tokens, settle
from jaxspec.step.batch import Batch, BatchShape
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.layers import Layers
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.sampler import ROWS, Logprobs, is_plain, sample, sample_plain
from jaxspec.step.tree import accept, ancestors

M = TypeVar("M", bound=nnx.Module)

Masks = UInt32[Array, "C+1 words"]

#: (weight leaves, KV cache [donated], penalty table, draft distributions, batch buffer, masks, before, chains) -> (KV
#: cache, result). Without `masks`, the program has no token masks; without `before` and `chains`, the host knows all
#: tokens.
Step = Callable[..., tuple[AnyKVCache, "StepResult"]]
#: Small arguments of a step that are new arrays in every run: batch buffer, before, chains.
MOVING = 4, 6, 7


class StepResult(NamedTuple):
    """`decision`: the sampled token of each of C logit rows, then 1 for each of T nodes that is accepted, else 0.
    `new`: what the next step may need (`jaxspec.step.ahead`); None if the program was made without `before`.

    The host reads only `decision` unless a request wants log-probabilities.
    """

    decision: Int32[Array, " C+T"]
    logprobs: Logprobs
    new: NewTokens | None


def split(model: M) -> tuple[nnx.GraphDef[M], Any, tuple[Array, ...]]:
    """Graph definition, tree definition and flat weights of a model. Each pytree leaf and level costs dispatch time."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return graph, treedef, tuple(leaves)


def make_step(graph: nnx.GraphDef[Decoder], treedef: Any, shape: BatchShape, layers: Layers) -> Step:
    """Return the pure step function for one batch shape. Compile it with the KV cache (argument 1) donated."""

    def step(
        leaves: tuple[Array, ...],
        kv_cache: AnyKVCache,
        penalty_table: PenaltyTable,
        drawn: DraftDistributions,
        buffer: Int32[Array, " size"],
        masks: Masks | None = None,
        before: NewTokens | None = None,
        chains: Chains | None = None,
    ) -> tuple[AnyKVCache, StepResult]:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        batch = Batch.unpack(buffer, shape)
        if before is not None and chains is not None:
            batch = settle(batch, before, chains, kv_cache.keys.shape[-1])
        mask = ancestors(batch.subtree)
        taps = tapped_layers(model.config) if kv_cache.features.shape[0] else ()
        x, new, tapped = layers.run(model, model.embed(batch.token, batch.position), kv_cache, batch, mask, taps=taps)
        final = model.finish(x)

        def logits_of(batch: Batch) -> jax.Array:
            return model.logits(final.at[batch.logit_node].get(mode="clip"))

        def decide() -> tuple[jax.Array, Logprobs]:
            return sample(logits_of(batch), batch, penalty_table, drawn, mask, masks)

        def decide_few() -> tuple[jax.Array, Logprobs]:
            few = batch.with_rows(layers.few_rows)
            return sample_plain(logits_of(few), few, drawn, shape.rows)

        if 0 < layers.few_rows < shape.rows:
            suffice = (batch.mode[ROWS] <= layers.few_rows) & is_plain(batch.mode)
            sampled, logprobs = lax.cond(suffice, decide_few, decide)
        else:
            sampled, logprobs = decide()
        accepted = accept(batch.token, batch.known, batch.parent_row, sampled, mask)
        kv_cache = layers.commit(kv_cache, new, batch, accepted, x)
        if taps:
            features = features_of(tapped, model.ops, model.config.norm_eps)
            kv_cache = kv_cache.keep(features, batch.slot, accepted)
        decision = jnp.concatenate([sampled, accepted.astype(jnp.int32)])
        given = None if before is None else new_tokens(batch, sampled, accepted, len(before.length))
        return kv_cache, StepResult(decision, logprobs, given)

    return step
