"""The two-layer head that reads an output length off an encoder's first token (SSJF, §3.1)."""

from __future__ import annotations

import jax
from flax import nnx

from jaxspec.models.bert import BertEncoder


class LengthHead(nnx.Module):
    """`hidden` -> `width` -> `outputs`, a ReLU between. What the outputs mean is the formulation's business."""

    def __init__(self, hidden: int, width: int, outputs: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(hidden, width, rngs=rngs)
        self.outer = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, first: jax.Array) -> jax.Array:
        """`first [B, hidden]`, the first token's vector -> `[B, outputs]`."""
        return self.outer(jax.nn.relu(self.inner(first)))


class LengthModel(nnx.Module):
    """An encoder with its head."""

    def __init__(self, encoder: BertEncoder, head: LengthHead):
        self.encoder, self.head = encoder, head

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """`ids [B, T]` int32, `mask [B, T]` bool -> the head's outputs `[B, outputs]`."""
        return self.head(self.encoder.first(ids, mask))
