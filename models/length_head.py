"""The two-layer head that predicts the output length from an encoder's first token (SSJF, §3.1)."""

from __future__ import annotations

import jax
from flax import nnx

from jaxspec.models.bert import BertEncoder


class LengthHead(nnx.Module):
    """MLP `hidden` -> `width` -> `outputs` with a ReLU. The meaning of the outputs depends on the formulation."""

    def __init__(self, hidden: int, width: int, outputs: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(hidden, width, rngs=rngs)
        self.outer = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, first: jax.Array) -> jax.Array:
        """Hidden states of the first tokens `[B, hidden]` -> `[B, outputs]`."""
        return self.outer(jax.nn.relu(self.inner(first)))


class LengthModel(nnx.Module):
    """An encoder with a length head."""

    def __init__(self, encoder: BertEncoder, head: LengthHead):
        self.encoder, self.head = encoder, head

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """`ids [B, T]` int32, `mask [B, T]` bool (True for tokens) -> `[B, outputs]`."""
        return self.head(self.encoder.first(ids, mask))
