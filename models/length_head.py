"""The two-layer head that reads an output length off an encoder's first token (SSJF, §3.1)."""

from __future__ import annotations

import jax
from flax import nnx


class LengthHead(nnx.Module):
    """`hidden` -> `width` -> `outputs`, a ReLU between. What the outputs mean is the formulation's business."""

    def __init__(self, hidden: int, width: int, outputs: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(hidden, width, rngs=rngs)
        self.outer = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, first: jax.Array) -> jax.Array:
        """`first [B, hidden]`, the first token's vector -> `[B, outputs]`."""
        return self.outer(jax.nn.relu(self.inner(first)))
