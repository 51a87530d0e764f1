"""The length probe: how long an answer goes on, from the target's hidden states while it is generated.

A small network on the features that drafters read (`jaxspec.models.drafter`), after TRAIL (Shahout et al. 2024,
arXiv 2410.01035). Its outputs are hazards: for each range of remaining tokens, the probability to end within it for an
answer that has not ended before. So an answer that was cut is training data too: no earlier range has ended it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

#: Upper ends of the ranges of remaining tokens; the lower end of the first is 0.
ENDS = np.asarray([2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048], np.float32)


class LengthProbe(nnx.Module):
    """MLP `inputs` -> `width` -> one hazard's logit per range."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
        self.inner = nnx.Linear(inputs, width, rngs=rngs)
        self.outer = nnx.Linear(width, len(ENDS), rngs=rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Features `[R, inputs]` of the last committed positions -> logits of hazards `[R, ranges]` float32."""
        return self.outer(jax.nn.relu(self.inner(features.astype(jnp.float32))))


def median_left(logits: jax.Array) -> jax.Array:
    """Median of the remaining tokens `[R]` float32, at least 1, from logits of hazards `[R, ranges]`.

    Interpolated within its range; beyond all ranges, their end.
    """
    survival = jnp.exp(jnp.cumsum(jax.nn.log_sigmoid(-logits), -1))
    before = jnp.concatenate([jnp.ones_like(survival[:, :1]), survival[:, :-1]], -1)
    at = jnp.minimum(jnp.sum(survival > 0.5, -1), len(ENDS) - 1)
    here, above = (jnp.take_along_axis(x, at[:, None], 1)[:, 0] for x in (survival, before))
    share = jnp.clip((above - 0.5) / jnp.maximum(above - here, 1e-6), 0.0, 1.0)
    starts = jnp.asarray(np.append(0.0, ENDS[:-1]), jnp.float32)
    return jnp.maximum(starts[at] + share * (jnp.asarray(ENDS) - starts)[at], 1.0)
