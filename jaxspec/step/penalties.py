"""Repetition, frequency and presence penalties, and logit biases.

Each running request with penalties has a row in a table on the device. The host adds tokens to the table once, when
they are decided (`add_tokens`, a small scatter into donated arrays). Draft tokens are not in the table: the step counts
them itself, for each node those among its ancestors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float32, Int32

from jaxspec.compilation import compile_ahead
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.request import Request
from jaxspec.step.batch import Batch
from jaxspec.step.kv_cache import Zeros, emptied
from jaxspec.step.warmup import CompileJob

#: Entries per call of `add_tokens`; longer lists take several calls.
UPDATE = 256


class PenaltyTable(NamedTuple):
    """Rows 1 … S belong to requests with penalties. Row 0 is zero, for all others."""

    generated: Int32[Array, "S+1 V"]  # times the token was generated
    prompt: Bool[Array, "S+1 V"]  # whether it is in the prompt
    bias: Float32[Array, "S+1 V"]  # logit_bias

    @classmethod
    def empty(cls, rows: int, vocab: int, zeros: Zeros = jnp.zeros) -> PenaltyTable:
        """`zeros` allocates the arrays."""
        shape = (rows + 1, vocab)
        return cls(zeros(shape, jnp.int32), zeros(shape, jnp.bool_), zeros(shape, jnp.float32))


def reset(table: PenaltyTable, row: Int32[Array, ""]) -> PenaltyTable:
    """Zero one row."""
    return PenaltyTable(*(x.at[row].set(jnp.zeros((), x.dtype)) for x in table))


def add_tokens(
    table: PenaltyTable,
    row: Int32[Array, ""],
    token: Int32[Array, " U"],
    bias: Float32[Array, " U"],
    count: Int32[Array, ""],
    prompt: Bool[Array, ""],
) -> PenaltyTable:
    """Add `bias` to these tokens' biases in `row` and `count` to how often they were generated, and mark them if they
    are in the `prompt`.

    U is `UPDATE`. Padding entries have a token ≥ V and are dropped.
    """
    return PenaltyTable(
        table.generated.at[row, token].add(count, mode="drop"),
        table.prompt.at[row, token].max(prompt, mode="drop"),
        table.bias.at[row, token].add(bias, mode="drop"),
    )


@dataclass(slots=True)
class _Row:
    index: int
    #: Tokens of the request that the table has.
    counted: int


class Penalties:
    """Owner of the penalty table: its programs, its rows, and which tokens each request's row has.

    `update` runs once per step, before it is packed; `release` when a request stops running. Not thread-safe.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, zeros: Zeros = jnp.zeros) -> None:
        #: The table on the device, an argument of every step.
        self.table = PenaltyTable.empty(max_num_seqs, vocab_size, zeros)
        self._vocab_size = vocab_size
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._free = list(range(1, self.table.bias.shape[0]))
        self._rows: dict[Request, _Row] = {}

    def clear(self) -> None:
        """Empty the table, whose arrays may be lost, and free all rows."""
        self.table = emptied(self.table)
        self._forget_rows()

    @property
    def free(self) -> int:
        """Rows that no request has; `max_num_seqs` if none runs."""
        return len(self._free)

    def job(self) -> CompileJob:
        """The job that compiles the programs; they are needed before `update`."""
        return CompileJob("penalties", self._compile, self._adopt)

    def _compile(self) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        row, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
        tokens = jax.ShapeDtypeStruct((UPDATE,), jnp.int32)
        biases = jax.ShapeDtypeStruct((UPDATE,), jnp.float32)
        return (
            compile_ahead(reset, self.table, row, donate=0),
            compile_ahead(add_tokens, self.table, row, tokens, biases, row, flag, donate=0),
        )

    def _adopt(self, programs: tuple[jax.stages.Compiled, jax.stages.Compiled]) -> None:
        self._reset, self._add_tokens = programs
        self.table = self._reset(self.table, np.int32(0))  # before serving: an accelerator's first run takes longer

    def update(self, penalised: Mapping[Request, SamplingParams]) -> dict[str, int]:
        """Bring the rows of these requests up to date with their known tokens. -> row by request id.

        A request without a row gets one: at most `max_num_seqs` run.
        """
        return {request.id: self._count(request, params) for request, params in penalised.items()}

    def release(self, request: Request) -> None:
        """Free the row of a request that stops running, if it has one. When it runs again, a new row is filled."""
        if (row := self._rows.pop(request, None)) is not None:
            self._free.append(row.index)

    def _count(self, request: Request, params: SamplingParams) -> int:
        row = self._rows.get(request)
        if row is None:
            row = self._rows[request] = _Row(self._free.pop(), request.prompt_len)
            self.table = self._reset(self.table, np.int32(row.index))
            self._add(row.index, request.tokens[: request.prompt_len], prompt=True)
            self._add(row.index, list(params.logit_bias), list(params.logit_bias.values()))
        self._add(row.index, request.tokens[row.counted :], count=1)
        row.counted = len(request.tokens)
        return row.index

    def _add(
        self, row: int, tokens: Sequence[int], bias: Sequence[float] = (), count: int = 0, prompt: bool = False
    ) -> None:
        for start in range(0, len(tokens), UPDATE):
            some = slice(start, start + UPDATE)
            token, biases = np.full(UPDATE, self._vocab_size, np.int32), np.zeros(UPDATE, np.float32)
            token[: len(tokens[some])], biases[: len(bias[some])] = tokens[some], bias[some]
            self.table = self._add_tokens(self.table, np.int32(row), token, biases, np.int32(count), np.bool_(prompt))


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
