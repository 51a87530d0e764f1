"""The target's own token at each node: argmax, or sampling with noise keyed by (request seed, position, token).

The noise of a position is the same whatever batch, tree or chunk computes it. So a seed gives the same text alone or in
a crowd, with speculation or without, preempted or not. Rounding differs between those by about 1e-5 in a logit, and an
argmax over noisy weights (as greedy decoding's) changes only if its two best are that close. Inverse-CDF sampling with
one number a position does not have that property: every boundary of 49,152 shifts, and about one token in 200 changed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.sampling_params import GREEDY_BELOW, MAX_LOGPROBS
from jaxspec.step.batch import Batch
from jaxspec.step.penalties import PenaltyTable, penalise
from jaxspec.step.rejection import Drawn, verify

CHOICE, PENALTY, LOGPROBS = 0, 1, 2  # places in Batch.mode
ARGMAX, SAMPLED, FILTERED = 0, 1, 2  # values of Batch.mode[CHOICE]


class Logprobs(NamedTuple):
    """Of each choice, before penalties and temperature."""

    chosen: jax.Array  # [C] float32
    top_ids: jax.Array  # [C, MAX_LOGPROBS] int32, most likely first
    top: jax.Array  # [C, MAX_LOGPROBS] float32
    following: jax.Array  # [C] log-probability of Batch.following


def sample(
    logits: jax.Array, batch: Batch, table: PenaltyTable, drawn: Drawn, mask: jax.Array
) -> tuple[jax.Array, Logprobs]:
    """logits `[C, V]` float32, mask `[T, T]` of ancestors -> choice `[C]` int32 and log-probabilities.

    The branches not asked for are not run: greedy decoding pays for an argmax only.
    """
    with_penalties = lax.cond(batch.mode[PENALTY] > 0, lambda x: penalise(x, batch, table, mask), lambda x: x, logits)
    sampled = lax.switch(
        jnp.clip(batch.mode[CHOICE], 0, 2),
        [
            argmax,
            lambda x: _sample(x, batch, drawn, filtered=False),
            lambda x: _sample(x, batch, drawn, filtered=True),
        ],
        with_penalties,
    )
    count = logits.shape[0]
    nothing = Logprobs(
        jnp.zeros(count),
        jnp.zeros((count, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((count, MAX_LOGPROBS)),
        jnp.zeros(count),
    )
    return sampled, lax.cond(batch.mode[LOGPROBS] > 0, lambda: _logprobs(logits, sampled, batch), lambda: nothing)


def _logprobs(logits: jax.Array, sampled: jax.Array, batch: Batch) -> Logprobs:
    logprobs = jax.nn.log_softmax(logits, -1)
    width = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = lax.top_k(logprobs, width)
    pad = ((0, 0), (0, MAX_LOGPROBS - width))
    pick = lambda token: jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]  # noqa: E731
    return Logprobs(
        pick(sampled),
        jnp.pad(ids.astype(jnp.int32), pad),
        jnp.pad(top, pad, constant_values=-jnp.inf),
        pick(batch.following),
    )


def clocks(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """An exponential random number `[C, vocab]` for each token at `position [C]` of the request with key `seed [C, 2]`.

    Threefry makes a key of (seed, position); an integer hash with good avalanche ("lowbias32") of that key and the
    token does the rest, at a tenth of Threefry's cost for 49,152 tokens.
    """

    def key_of(words: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, place))

    keys = jax.vmap(key_of)(seed, position)  # [C, 2] uint32
    x = jnp.arange(vocab, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9) ^ keys[:, :1]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = (x ^ (x >> 16)) + keys[:, 1:]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x ^= x >> 16
    # Small numbers decide which unlikely token wins: from the low end of [0, 1), where float32 is finest.
    fraction = jnp.minimum((x.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-fraction)


def _sample(logits: jax.Array, batch: Batch, drawn: Drawn, filtered: bool) -> jax.Array:
    greedy = batch.temperature < GREEDY_BELOW
    scaled = logits / jnp.where(greedy, 1.0, batch.temperature)[:, None]
    weights = jnp.exp(scaled - jnp.max(scaled, -1, keepdims=True))
    if filtered:
        weights = jnp.where(keep(weights, batch.top_k, batch.top_p, batch.min_p), weights, 0.0)
    position = batch.position.at[batch.logit_node].get(mode="clip") + 1
    clock = clocks(batch.seed, position, logits.shape[-1])
    if batch.children.shape[1]:
        left, taken = verify(weights, batch, drawn)
        token = jnp.where(taken >= 0, taken, race(left, clock))
    else:
        token = race(weights, clock)
    return jnp.where(greedy, argmax(logits), token)


def race(weights: jax.Array, clock: jax.Array) -> jax.Array:
    """The token whose clock, run at the speed of its weight, rings first -> `[C]` int32; both `[C, V]`.

    Token i wins with probability weights[i] / Σ weights: the Gumbel-max trick without its logarithms.
    """
    return argmax(weights / clock)


def argmax(x: jax.Array, block: int = 128) -> jax.Array:
    """First index of each row's largest value, `[C, V]` -> `[C]` int32.

    By blocks: XLA on CPU vectorises a maximum but not an argmax, which takes twenty times as long.
    """
    count, size = x.shape
    blocks = jnp.pad(x, ((0, 0), (0, -size % block)), constant_values=-jnp.inf).reshape(count, -1, block)
    best = jnp.argmax(jnp.max(blocks, -1), -1)
    inside = jnp.take_along_axis(blocks, best[:, None, None], 1)[:, 0]
    return (best * block + jnp.argmax(inside, -1)).astype(jnp.int32)


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
