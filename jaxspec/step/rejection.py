"""Rejection sampling of draft tokens (`acceptance: rejection`), the acceptance rule that the papers assume.

At each node the drafter draws children one after another, without replacement, from its distribution q. Each child is
accepted with probability min(1, p / q), where p is the target's distribution. After a rejection, p becomes
normalised max(p - q, 0), and the token is removed from q. If no child is accepted, the token is sampled from the
residual p. So every token follows the target's distribution, whatever the drafter: Leviathan et al. (ICML 2023) for one
child; SpecInfer's multi-step sampling (Miao et al., ASPLOS 2024, Alg. 3) for several, here with draws without
replacement (Jeon et al. 2024), because siblings in a tree hold different tokens.

The draws must not be filtered afterwards: which nodes are verified must not depend on which tokens were drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from jaxspec.step.batch import Batch


class DraftDistributions(NamedTuple):
    """Distributions that the drafts in flight were drawn from. Both fields are empty without rejection sampling.

    logits: drafter logits divided by the request's temperature, per request, level of the tree and place (index of the
    parent in the level above). vocab: the target's token id of each of the drafter's Vd columns.
    """

    logits: Float32[Array, "requests levels width Vd"]
    vocab: Int32[Array, " Vd"]

    @classmethod
    def zeros(cls, requests: int, levels: int, width: int, vocab: Int32[Array, " Vd"]) -> DraftDistributions:
        """Allocate zeros for this many requests, levels and places per level."""
        return cls(jnp.zeros((requests, levels, width, vocab.shape[0])), vocab)

    @classmethod
    def empty(cls) -> DraftDistributions:
        """Empty arrays: no rejection sampling."""
        return cls(jnp.zeros((0, 0, 0, 0)), jnp.zeros(0, jnp.int32))


def verify(
    weights: Float32[Array, "C V"], batch: Batch, drawn: DraftDistributions
) -> tuple[Float32[Array, "C V"], Int32[Array, " C"]]:
    """Accept or reject the draft children of each logit row.

    weights: the target's unnormalised probabilities. Returns the residual distribution and the accepted child's token,
    -1 if there is none. Rows without drawn children (`Batch.drawn_from` is -1) keep their weights, normalised.
    """
    p = weights / jnp.sum(weights, -1, keepdims=True)
    rows = drawn.logits.reshape(-1, drawn.vocab.shape[0])
    draft_logits = rows.at[batch.drawn_from].get(mode="clip")
    position = batch.position.at[batch.logit_node].get(mode="clip") + 1
    uniform = uniforms(batch.seed, position, batch.children.shape[1])
    taken = jnp.full(p.shape[0], -1, jnp.int32)
    for i in range(batch.children.shape[1]):
        child = batch.children[:, i]
        tried = (child >= 0) & (taken < 0) & (batch.drawn_from >= 0)
        at = jnp.maximum(child, 0)[:, None]
        q = jnp.zeros_like(p).at[:, drawn.vocab].set(jax.nn.softmax(draft_logits))
        passed = uniform[:, i] * jnp.take_along_axis(q, at, 1)[:, 0] < jnp.take_along_axis(p, at, 1)[:, 0]
        taken = jnp.where(tried & passed, child, taken)
        rejected = (tried & ~passed)[:, None]
        # If p equals q, rounding may leave no mass; keep p then, since a rejection was almost impossible.
        p = jnp.where(rejected, _normalised(jnp.maximum(p - q, 0), p), p)
        # Mask the logit, not q: next to a dominant token all other probabilities may underflow to zero.
        draft_logits = jnp.where(rejected & (drawn.vocab == at), -jnp.inf, draft_logits)
    return p, taken


def _normalised(x: Float32[Array, "C V"], fallback: Float32[Array, "C V"]) -> Float32[Array, "C V"]:
    """Rows divided by their sum; rows of `fallback` where the sum is zero."""
    total = jnp.sum(x, -1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), fallback)


def uniforms(seed: Int32[Array, "C 2"], position: Int32[Array, " C"], count: int) -> Float32[Array, "C {count}"]:
    """Uniform random numbers for the children at `position` of the request with key `seed`.

    Independent of `sampler.exponential_noise`, which samples the token if all children are rejected.
    """

    def row(words: Int32[Array, " 2"], position: Int32[Array, ""]) -> Float32[Array, " count"]:
        key = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), 1), (count,))

    return jax.vmap(row)(seed, position)
