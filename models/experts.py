"""Mixture of experts: a router chooses some of a layer's MLPs for each token.

Rows are grouped by expert, so that each expert multiplies its rows together and no row is padded: the only static sizes
are the tokens of a step and the experts of a token. The kernels do not read experts without tokens.

Nothing here sorts. On NVIDIA GPUs a sort runs in CUB, which no CUDA graph can hold: a step would be launched in a piece
per layer, and the host would wait for each.
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
    weight, chosen = choose(share, experts.chosen)
    if experts.normalised:
        weight = weight / weight.sum(-1, keepdims=True)
    place, counts = places(chosen.reshape(-1), experts.count)
    token = jnp.zeros_like(place).at[place].set(jnp.arange(place.shape[0], dtype=place.dtype) // experts.chosen)
    h = grouped(x[token], "experts_gate_up", 2 * experts.width, counts)
    gate, up = jnp.split(h, 2, axis=-1)
    y = grouped(act(gate) * up, "experts_down", x.shape[-1], counts)
    of_token = y[place].reshape(*chosen.shape, -1)
    total = of_token[:, 0] * weight[:, :1].astype(y.dtype)
    for i in range(1, experts.chosen):
        total = total + of_token[:, i] * weight[:, i : i + 1].astype(y.dtype)
    return total


def choose(share: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of `share [T, experts]`, and their indices int32, largest first; of equals the
    first ones. Shares are not negative."""
    ids = jnp.arange(share.shape[1], dtype=jnp.int32)
    values, indices = [], []
    for _ in range(count):
        best = share.max(-1)
        index = jnp.where(share == best[:, None], ids, ids.size - 1).min(-1)  # of NaN the last one
        values.append(best)
        indices.append(index)
        share = jnp.where(ids == index[:, None], -1.0, share)
    return jnp.stack(values, -1), jnp.stack(indices, -1)


def places(expert: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Each row's place among the rows grouped by expert, `[N]` int32, and how many rows each expert has, `[count]`
    int32. expert: `[N]` int32. Rows of one expert keep their order.
    """
    mine = (expert[:, None] == jnp.arange(count)[None, :]).astype(jnp.int32)
    upto = jnp.cumsum(mine, 0)
    counts = upto[-1]
    before = jnp.cumsum(counts) - counts
    return before[expert] + upto[jnp.arange(expert.shape[0]), expert] - 1, counts
