"""Token trees in preorder: who is whose ancestor, and which nodes are accepted (design: one comparison for both)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ancestors(subtree: jax.Array) -> jax.Array:
    """Mask `[T, T]`, true at `[t, s]` when node s is t or an ancestor of t: `s ≤ t < s + subtree[s]`.

    Chains, trees and neighbouring requests need nothing more: every request's nodes form an interval of their own.
    """
    node = jnp.arange(subtree.shape[0])
    return (node[None, :] <= node[:, None]) & (node[:, None] < (node + subtree)[None, :])


def accept(token: jax.Array, known: jax.Array, parent_row: jax.Array, sampled: jax.Array, mask: jax.Array) -> jax.Array:
    """Accepted nodes `[T]` bool: no draft among a node and its ancestors differs from its parent's choice.

    token, known, parent_row `[T]`; choice `[C]`; mask `[T, T]` from `ancestors`. Siblings hold different tokens, so
    in each tree the accepted nodes form one path from the root.
    """
    mismatch = (known == 0) & (token != sampled[parent_row])
    return ~jnp.any(mask & mismatch[None, :], axis=1)
