"""What a step or draft round takes from the step before it, on the device.

The host may launch a step before it knows the results of the one before. It names tokens by where they will be:

* in a step, token -1 (`UNKNOWN`) is the last new token of a request, and -2 - i (`FIRST_DRAFT` - i) is node i of the
  draft round's chains;
* in a round, token -1 - j is new token j of a request, which may not exist.

How many drafts were accepted decides where a step's nodes are: the host packs positions as if none were, and the
device moves them (`settle`). A round always computes all the tokens that there may be, and stores those that there are
(`catch_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from jaxspec.sched.plan import FIRST_DRAFT
from jaxspec.sched.request import UNKNOWN
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.batch import Batch

#: Tokens of a round's chains by the round's requests, padded to the most of any shape.
Chains = Int32[Array, "R_max DEPTH"]


class NewTokens(NamedTuple):
    """What the trees of a step gave: accepted drafts, then the token after them. R_max: most trees of any step."""

    token: Int32[Array, "R_max DEPTH+1"]
    length: Int32[Array, " R_max"]  # number of new tokens; 0: padding; no meaning for a chunk that does not sample

    @classmethod
    def none(cls, most: int, zeros: Callable[[Sequence[int], Any], Any] = jnp.zeros) -> NewTokens:
        """Stands for a step under way where there is none, in programs for up to `most` trees."""
        return cls(zeros((most, DEPTH + 1), jnp.int32), zeros((most,), jnp.int32))


def new_tokens(batch: Batch, sampled: Int32[Array, " C"], accepted: Bool[Array, " T"], most: int) -> NewTokens:
    """The new tokens of a step's trees, for up to `most` trees. Traced."""
    trees, node = jnp.arange(batch.first.shape[0])[:, None], batch.logit_node
    of = batch.tree.at[node].get(mode="clip")
    last_known = batch.committed + jnp.sum((batch.tree[None] == trees) & (batch.known > 0)[None], 1) - 1
    place = batch.position.at[node].get(mode="clip") - last_known.at[of].get(mode="clip")
    # Logit rows are in the order of their nodes; padding has node 0.
    real = (jnp.diff(node, prepend=-1) > 0) & (of < batch.first.shape[0])
    gives = real & accepted.at[node].get(mode="clip") & (place >= 0)
    length = jnp.sum((of[None] == trees) & gives[None], 1, dtype=jnp.int32)
    token = jnp.zeros((most, DEPTH + 1), jnp.int32).at[jnp.where(gives, of, most), place].set(sampled, mode="drop")
    return NewTokens(token, jnp.pad(length, (0, most - len(length))))


def settle(batch: Batch, before: NewTokens, chains: Chains, page_size: int) -> Batch:
    """The batch of a step with its tokens, and with its nodes where they are after `before`. Traced."""
    follows = batch.after >= 0
    moved = jnp.where(follows, before.length.at[batch.after].get(mode="clip") - 1, 0)
    last = before.token.at[batch.after, moved].get(mode="clip")
    of = batch.tree
    draft = chains.reshape(-1).at[FIRST_DRAFT - batch.token].get(mode="clip")
    token = jnp.where(batch.token == UNKNOWN, last.at[of].get(mode="clip"), batch.token)
    position = batch.position + moved.at[of].get(mode="fill", fill_value=0)
    page = batch.table.at[of, position // page_size].get(mode="clip")
    return batch._replace(
        token=jnp.where(batch.token <= FIRST_DRAFT, draft, token),
        position=position,
        committed=batch.committed + moved,
        slot=jnp.where(batch.slot >= 0, page * page_size + position % page_size, -1),
    )


def catch_up(batch: Batch, before: NewTokens) -> Batch:
    """The batch of a round with its tokens: only those that exist are known, and the last of them has the logits.
    Traced. Logit row i is that of tree i."""
    length = jnp.where(batch.after >= 0, before.length.at[batch.after].get(mode="clip"), 1)
    of, place = batch.tree, -1 - batch.token
    token = before.token.at[batch.after.at[of].get(mode="clip"), place].get(mode="clip")
    exists = place < length.at[of].get(mode="clip")
    return batch._replace(
        token=jnp.where(batch.token < 0, token, batch.token),
        known=jnp.where(batch.token < 0, exists.astype(jnp.int32), batch.known),
        logit_node=batch.logit_node + length - 1,
    )
