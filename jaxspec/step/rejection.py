"""Rejection sampling of drafts: `acceptance: rejection`, the rule that the papers assume.

A node's children were drawn one after another, without replacement, from the drafter's distribution q there. Each in
turn is accepted with probability min(1, p / q), p being the target's; after a rejection p loses q (and is normalised)
and q loses the token. What is left of p at the end gives the token if no child was accepted. So the token has the
target's distribution, whatever the drafter: Leviathan et al. (ICML 2023) for one child; for several SpecInfer's
multi-step sampling (Miao et al., ASPLOS 2024, Alg. 3), here with draws without replacement (Jeon et al. 2024), because
siblings hold different tokens in a tree.

It needs draws that nothing filtered afterwards: which nodes are verified must not depend on what was drawn in them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.step.batch import Batch


class Drawn(NamedTuple):
    """What the drafts under way were drawn from; without rejection sampling both are empty.

    logits `[requests, levels, width, V']` float32, divided by the request's temperature: of the distribution at each
    place of the level above; vocab `[V']` int32: the target's token of each column.
    """

    logits: jax.Array
    vocab: jax.Array

    @classmethod
    def room(cls, requests: int, levels: int, width: int, vocab: jax.Array) -> Drawn:
        return cls(jnp.zeros((requests, levels, width, vocab.shape[0])), vocab)

    @classmethod
    def none(cls) -> Drawn:
        return cls(jnp.zeros((0, 0, 0, 0)), jnp.zeros(0, jnp.int32))


def verify(weights: jax.Array, batch: Batch, drawn: Drawn) -> tuple[jax.Array, jax.Array]:
    """weights `[C, V]` of the target at each choice -> (what is left of them `[C, V]`, the accepted child's token `[C]`
    int32, -1 if there is none). Choices whose children were not drawn keep their weights.
    """
    p = weights / jnp.sum(weights, -1, keepdims=True)
    rows = drawn.logits.reshape(-1, drawn.vocab.shape[0])
    own = rows.at[batch.drawn_from].get(mode="clip")
    position = batch.position.at[batch.logit_node].get(mode="clip") + 1
    chances = coins(batch.seed, position, batch.children.shape[1])
    taken = jnp.full(p.shape[0], -1, jnp.int32)
    for i in range(batch.children.shape[1]):
        child = batch.children[:, i]
        tried = (child >= 0) & (taken < 0) & (batch.drawn_from >= 0)
        at = jnp.maximum(child, 0)[:, None]
        q = jnp.zeros_like(p).at[:, drawn.vocab].set(jax.nn.softmax(own))
        good = chances[:, i] * jnp.take_along_axis(q, at, 1)[:, 0] < jnp.take_along_axis(p, at, 1)[:, 0]
        taken = jnp.where(tried & good, child, taken)
        rejected = (tried & ~good)[:, None]
        # Rounding may leave nothing where p and q are equal; a rejection was then next to impossible.
        p = jnp.where(rejected, _normal(jnp.maximum(p - q, 0), p), p)
        # Among the logits: the chances of what is left may all be too small for a float as long as this one is there.
        own = jnp.where(rejected & (drawn.vocab == at), -jnp.inf, own)
    return p, taken


def _normal(x: jax.Array, instead: jax.Array) -> jax.Array:
    """Rows that sum to one; those of `instead` where there is nothing to divide."""
    total = jnp.sum(x, -1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), instead)


def coins(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """Uniform numbers `[C, count]` for the children that would stand at `position [C]` of the request with key
    `seed [C, 2]`. Another stream than `sampler.clocks`: that one draws the token if all are rejected."""

    def of(words: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, place), 1), (count,))

    return jax.vmap(of)(seed, position)
