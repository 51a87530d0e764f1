"""Token trees in preorder: the ancestor mask and the acceptance rule."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


def ancestors(subtree: Int32[Array, " T"]) -> Bool[Array, "T T"]:
    """Tree attention mask: true at `[t, s]` if node s is t or an ancestor of t, that is `s ≤ t < s + subtree[s]`.

    In preorder the nodes of every subtree, and of every request, form an interval. So one comparison covers chains,
    trees and several requests.
    """
    node = jnp.arange(subtree.shape[0])
    return (node[None, :] <= node[:, None]) & (node[:, None] < (node + subtree)[None, :])


def accept(
    token: Int32[Array, " T"],
    known: Int32[Array, " T"],
    parent_row: Int32[Array, " T"],
    sampled: Int32[Array, " C"],
    mask: Bool[Array, "T T"],
) -> Bool[Array, " T"]:
    """Accepted nodes: neither the node nor an ancestor is a draft that differs from the token sampled at its parent.

    token, known, parent_row: fields of `Batch`; sampled: token of each logit row; mask: from `ancestors`. Siblings hold
    different tokens, so the accepted nodes of a tree form one path from the root.
    """
    mismatch = (known == 0) & (token != sampled[parent_row])
    return ~jnp.any(mask & mismatch[None, :], axis=1)
