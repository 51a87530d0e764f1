"""Repetition, frequency and presence penalties, and logit biases.

Each request with penalties has a row in a table on the device. The host adds tokens to the table once, when they are
decided (`update`, a small scatter into donated arrays). Draft tokens are not in the table: the step counts them itself,
for each node those among its ancestors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from jaxspec.step.batch import Batch

#: Entries per call of `update`; longer lists take several calls.
UPDATE = 256


class PenaltyTable(NamedTuple):
    """Rows 1 … S belong to requests with penalties. Row 0 is zero, for all others."""

    generated: Int32[Array, "S+1 V"]  # times the token was generated
    prompt: Bool[Array, "S+1 V"]  # whether it is in the prompt
    bias: Float32[Array, "S+1 V"]  # logit_bias

    @classmethod
    def empty(cls, rows: int, vocab: int) -> PenaltyTable:
        shape = (rows + 1, vocab)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))


def reset(table: PenaltyTable, row: Int32[Array, ""]) -> PenaltyTable:
    """Zero one row."""
    return PenaltyTable(*(x.at[row].set(jnp.zeros((), x.dtype)) for x in table))


def update(
    table: PenaltyTable,
    row: Int32[Array, " U"],
    token: Int32[Array, " U"],
    count: Int32[Array, " U"],
    prompt: Bool[Array, " U"],
    bias: Float32[Array, " U"],
) -> PenaltyTable:
    """Add `count` to the generated tokens, mark `prompt` and add `bias` at (row, token).

    U is `UPDATE`. Padding entries have a token ≥ V and are dropped.
    """
    return PenaltyTable(
        table.generated.at[row, token].add(count, mode="drop"),
        table.prompt.at[row, token].max(prompt, mode="drop"),
        table.bias.at[row, token].add(bias, mode="drop"),
    )


def penalise(
    logits: Float32[Array, "C V"], batch: Batch, table: PenaltyTable, mask: Bool[Array, "T T"]
) -> Float32[Array, "C V"]:
    """Apply penalties and biases to `logits`. mask: from `tree.ancestors`.

    Frequency and presence follow OpenAI's formula. Repetition follows the CTRL paper (§4.1): divide positive logits,
    multiply negative ones.
    """
    row = batch.penalty_row
    drafts = mask.at[batch.logit_node].get(mode="clip") & (batch.known == 0)[None, :]  # [C, T]
    rows = jnp.arange(logits.shape[0])[:, None]
    count = table.generated[row].at[rows, batch.token[None, :]].add(drafts.astype(jnp.int32))
    seen = (count > 0) | table.prompt[row]
    repetition = batch.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= batch.frequency[:, None] * count
    logits -= batch.presence[:, None] * (count > 0)
    return logits + table.bias[row]
