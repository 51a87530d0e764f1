"""What a request has said so far, on the device: token counts, prompt tokens and logit biases of penalised requests.

Each penalised request owns a row. The host tells the table about tokens once, when they are decided (`update`, a small
donated scatter); drafts inside a tree are counted by the step itself, each node seeing its own ancestors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.step.batch import Batch

#: Entries one call of `update` carries; longer lists take several calls.
UPDATE = 256


class PenaltyTable(NamedTuple):
    """Rows 1 … S belong to requests, row 0 stays zero for everyone else."""

    count: jax.Array  # [S+1, V] int32: times generated
    prompt: jax.Array  # [S+1, V] bool: in the prompt
    bias: jax.Array  # [S+1, V] float32: logit_bias

    @classmethod
    def empty(cls, rows: int, vocab: int) -> PenaltyTable:
        shape = (rows + 1, vocab)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))


def reset(table: PenaltyTable, row: jax.Array) -> PenaltyTable:
    """Zero one row."""
    return PenaltyTable(*(x.at[row].set(jnp.zeros((), x.dtype)) for x in table))


def update(
    table: PenaltyTable, row: jax.Array, token: jax.Array, count: jax.Array, prompt: jax.Array, bias: jax.Array
) -> PenaltyTable:
    """Add `count`, mark `prompt`, add `bias` at (row, token); all `[UPDATE]`, padding has token ≥ V."""
    return PenaltyTable(
        table.count.at[row, token].add(count, mode="drop"),
        table.prompt.at[row, token].max(prompt, mode="drop"),
        table.bias.at[row, token].add(bias, mode="drop"),
    )


def penalise(logits: jax.Array, batch: Batch, table: PenaltyTable, mask: jax.Array) -> jax.Array:
    """Repetition, frequency and presence penalties and biases on `logits [C, V]`; mask `[T, T]` of ancestors.

    OpenAI's formula for the additive ones, the CTRL paper's (§4.1) for repetition: divide if positive, else multiply.
    """
    row = batch.penalty_row
    drafts = mask.at[batch.logit_node].get(mode="clip") & (batch.known == 0)[None, :]  # [C, T]
    rows = jnp.arange(logits.shape[0])[:, None]
    count = table.count[row].at[rows, batch.token[None, :]].add(drafts.astype(jnp.int32))
    said = (count > 0) | table.prompt[row]
    repetition = batch.repetition[:, None]
    logits = jnp.where(said, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= batch.frequency[:, None] * count
    logits -= batch.presence[:, None] * (count > 0)
    return logits + table.bias[row]
