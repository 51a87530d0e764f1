"""Mixture of experts: a router chooses some of a layer's MLPs for each token.

Rows are sorted by expert, so that each expert multiplies its rows together and no row is padded: the only static sizes
are the tokens of a step and the experts of a token. The CPU kernel does not read experts without tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.models.config import Experts

#: (rows [N, in] by expert, weight's name, out, counts [experts] int32) -> [N, out]
Grouped = Callable[[jax.Array, str, int, jax.Array], jax.Array]


def mixture(
    experts: Experts, act: Callable[[jax.Array], jax.Array], x: jax.Array, logits: jax.Array, grouped: Grouped
) -> jax.Array:
    """The weighted sum of the chosen experts' outputs, `[T, hidden]`, for tokens `x [T, hidden]` with router logits
    `[T, experts]`.

    Mixtral (Jiang et al. 2024, §2.1) and Qwen3-MoE. The sum of a token has one order, whatever the other tokens are.
    """
    share = jax.nn.softmax(logits.astype(jnp.float32), -1)
    weight, chosen = jax.lax.top_k(share, experts.chosen)
    if experts.normalised:
        weight = weight / weight.sum(-1, keepdims=True)
    by_row = chosen.reshape(-1)
    order = jnp.argsort(by_row, stable=True)
    counts = jnp.zeros(experts.count, jnp.int32).at[by_row].add(1)
    h = grouped(x[order // experts.chosen], "experts_gate_up", 2 * experts.width, counts)
    gate, up = jnp.split(h, 2, axis=-1)
    y = grouped(act(gate) * up, "experts_down", x.shape[-1], counts)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    of_token = y[back].reshape(*chosen.shape, -1)
    total = of_token[:, 0] * weight[:, :1].astype(y.dtype)
    for i in range(1, experts.chosen):
        total = total + of_token[:, i] * weight[:, i : i + 1].astype(y.dtype)
    return total
