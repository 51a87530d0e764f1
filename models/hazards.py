"""Discrete-time survival: the likelihood of lengths under hazards of ranges (Kvamme & Borgan 2021, §3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def negative_log_likelihood(
    logits: jax.Array, length: jax.Array, ended: jax.Array | None, ends: np.ndarray
) -> jax.Array:
    """`[R]` of answers that ended at `length [R]` (`ended [R]` bool; None: all), or were cut there and would have gone
    on.

    `logits [R, ranges]` of the hazards: for each range, the probability to end within it after reaching it. `ends
    [ranges]`: the ranges' upper ends, ascending. An answer beyond the last range has survived all.
    """
    at = jnp.searchsorted(jnp.asarray(ends), length.astype(jnp.float32))
    # Of a range that was cut short, nothing is known: only those before it count.
    survived = jnp.arange(len(ends)) < at[:, None]
    loss = -jnp.sum(jnp.where(survived, jax.nn.log_sigmoid(-logits), 0.0), -1)
    here = jnp.take_along_axis(logits, jnp.minimum(at, len(ends) - 1)[:, None], 1)[:, 0]
    within = at < len(ends) if ended is None else ended & (at < len(ends))
    return loss - jnp.where(within, jax.nn.log_sigmoid(here), 0.0)
