"""The target's own token at each node: argmax, or inverse-CDF sampling keyed by (request seed, position).

One uniform number belongs to each position of a request, whatever batch, tree or chunk computes it. So a seed gives the
same text alone or in a crowd, with speculation or without, preempted or not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.sampling import MAX_LOGPROBS
from jaxspec.step.batch import Batch
from jaxspec.step.penalties import PenaltyTable, penalise

CHOICE, PENALTY, LOGPROBS = 0, 1, 2  # places in Batch.mode
ARGMAX, SAMPLED, FILTERED = 0, 1, 2  # values of Batch.mode[CHOICE]


class Logprobs(NamedTuple):
    """Of each choice, before penalties and temperature."""

    chosen: jax.Array  # [C] float32
    top_ids: jax.Array  # [C, MAX_LOGPROBS] int32, most likely first
    top: jax.Array  # [C, MAX_LOGPROBS] float32
    following: jax.Array  # [C] log-probability of Batch.following


def choose(logits: jax.Array, batch: Batch, table: PenaltyTable, mask: jax.Array) -> tuple[jax.Array, Logprobs]:
    """logits `[C, V]` float32, mask `[T, T]` of ancestors -> choice `[C]` int32 and log-probabilities.

    The branches not asked for are not run: greedy decoding pays for an argmax only.
    """
    with_penalties = lax.cond(
        batch.mode[PENALTY] > 0, lambda x: penalise(x, batch, table, mask), lambda x: x, logits
    )
    choice = lax.switch(
        jnp.clip(batch.mode[CHOICE], 0, 2),
        [
            lambda x: jnp.argmax(x, -1).astype(jnp.int32),
            lambda x: _sample(x, batch, filtered=False),
            lambda x: _sample(x, batch, filtered=True),
        ],
        with_penalties,
    )
    count = logits.shape[0]
    nothing = Logprobs(
        jnp.zeros(count), jnp.zeros((count, MAX_LOGPROBS), jnp.int32), jnp.zeros((count, MAX_LOGPROBS)), jnp.zeros(count)
    )
    return choice, lax.cond(
        batch.mode[LOGPROBS] > 0, lambda: _logprobs(logits, choice, batch), lambda: nothing
    )


def _logprobs(logits: jax.Array, choice: jax.Array, batch: Batch) -> Logprobs:
    logprobs = jax.nn.log_softmax(logits, -1)
    width = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = lax.top_k(logprobs, width)
    pad = ((0, 0), (0, MAX_LOGPROBS - width))
    pick = lambda token: jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]  # noqa: E731
    return Logprobs(
        pick(choice), jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(top, pad, constant_values=-jnp.inf), pick(batch.following)
    )


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """The number in [0, 1) that decides the token at `position [C]` of the request with key `seed [C, 2]`."""

    def one(words: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, place))

    return jax.vmap(one)(seed, position)


def _sample(logits: jax.Array, batch: Batch, filtered: bool) -> jax.Array:
    greedy = batch.temperature < 1e-5
    scaled = logits / jnp.where(greedy, 1.0, batch.temperature)[:, None]
    weights = jnp.exp(scaled - jnp.max(scaled, -1, keepdims=True))
    if filtered:
        weights = jnp.where(keep(weights, batch.top_k, batch.top_p, batch.min_p), weights, 0.0)
    position = batch.position.at[batch.choice_node].get(mode="clip") + 1
    drawn = inverse_cdf(weights, uniform(batch.seed, position))
    return jnp.where(greedy, jnp.argmax(logits, -1), drawn).astype(jnp.int32)


def inverse_cdf(weights: jax.Array, u: jax.Array, block: int = 128) -> jax.Array:
    """First index where the running sum of `weights [C, V]` exceeds `u [C]` × their total -> `[C]` int32.

    Two levels (blocks, then inside one) instead of one running sum over the vocabulary: 400 steps instead of 49,152,
    and rounding errors that stay inside a block.
    """
    count, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % block))).reshape(count, -1, block)
    sums = jnp.cumsum(jnp.sum(padded, -1), -1)
    target = u * sums[:, -1]
    b = jnp.minimum(jnp.sum(sums <= target[:, None], -1), sums.shape[1] - 1)
    before = jnp.where(b > 0, jnp.take_along_axis(sums, jnp.maximum(b - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.take_along_axis(padded, b[:, None, None], 1)[:, 0]
    running = jnp.cumsum(inside, -1)
    # Rounding may leave the target past the block's last running sum: then the block's last possible token is it.
    last = block - 1 - jnp.argmax((inside > 0)[:, ::-1], -1)
    offset = jnp.minimum(jnp.sum(running <= (target - before)[:, None], -1), last)
    return (b * block + offset).astype(jnp.int32)


def keep(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which tokens survive the filters: `weights [C, V]` (largest is 1), the rest `[C]` -> `[C, V]` bool.

    Top-k first, then top-p of what is left, then min-p. Thresholds come from bisection on the float's bits (31
    comparisons, exact) instead of a sort, which takes XLA on CPU several milliseconds a row. Tokens tied at a threshold
    all stay.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)  # order of non-negative floats = order of their bits

    def threshold(enough: jax.Array, measure: jax.Array, live: jax.Array) -> jax.Array:
        """Largest bit pattern b such that Σ measure over live tokens with bits ≥ b is still ≥ enough."""

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low + 1) // 2
            total = jnp.sum(jnp.where(live & (bits >= middle[:, None]), measure, 0), -1)
            ok = total >= enough
            return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

        zero = jnp.zeros(weights.shape[0], jnp.int32)
        one = jnp.full_like(zero, lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32))
        return lax.fori_loop(0, 31, halve, (zero, one))[0]

    everything = jnp.ones_like(bits, bool)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, weights.shape[1]), weights.shape[1])
    live = bits >= threshold(limit, jnp.ones_like(bits), everything)[:, None]
    mass = jnp.sum(jnp.where(live, weights, 0.0), -1)
    nucleus = threshold(top_p * mass, weights, live)
    live &= (bits >= nucleus[:, None]) | (top_p >= 1)[:, None]  # 1: all of it, however sums round
    return live & (weights >= min_p[:, None])
