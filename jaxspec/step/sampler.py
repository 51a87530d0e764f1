"""The target's token at each logit row: argmax, or sampling with noise keyed by (request seed, position, token).

The noise at a position does not depend on the batch, tree or chunk it is computed in. So a seed gives the same text
in any batch, with or without speculation or preemption. On the CPU kernels logits are equal, too (`batch_invariant`);
elsewhere they differ by about 1e-5 between those cases, and an argmax over noisy weights, like greedy decoding's,
changes only if its two best values are that close. Inverse-CDF sampling with one random number per position lacks
this property: each of 49,152 boundaries shifts, and about one token in 200 changed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxspec.sampling_params import GREEDY_BELOW, MAX_LOGPROBS
from jaxspec.step.batch import Batch
from jaxspec.step.masks import forbid
from jaxspec.step.penalties import PenaltyTable, penalise
from jaxspec.step.rejection import DraftDistributions, verify

SAMPLING, PENALTY, LOGPROBS, MASK, ROWS = 0, 1, 2, 3, 4  # indices into Batch.mode
ARGMAX, SAMPLED, FILTERED = 0, 1, 2  # values of Batch.mode[SAMPLING]
#: Values whose maximum is taken at a time.
_BLOCK = 128


class Logprobs(NamedTuple):
    """Log-probabilities of each logit row, before penalties, masks and temperature. L is `MAX_LOGPROBS`."""

    chosen: Float32[Array, " C"]  # of the sampled token
    top_ids: Int32[Array, "C L"]  # most likely first
    top: Float32[Array, "C L"]
    following: Float32[Array, " C"]  # of Batch.following


def sample(
    logits: Float32[Array, "C V"],
    batch: Batch,
    penalty_table: PenaltyTable,
    drawn: DraftDistributions,
    mask: Bool[Array, "T T"],
    token_masks: UInt32[Array, "C+1 words"] | None = None,
) -> tuple[Int32[Array, " C"], Logprobs]:
    """Sample one token per logit row. mask: from `tree.ancestors`; token_masks: see `step.masks`. Returns the tokens
    and their log-probabilities.

    Only the branches selected by `Batch.mode` run: greedy decoding costs one argmax.
    """
    with_penalties = lax.cond(
        batch.mode[PENALTY] > 0, lambda x: penalise(x, batch, penalty_table, mask), lambda x: x, logits
    )
    choices = with_penalties
    if token_masks is not None:
        choices = lax.cond(batch.mode[MASK] > 0, lambda x: forbid(x, batch.mask_row, token_masks), lambda x: x, choices)
    sampled = lax.switch(
        jnp.clip(batch.mode[SAMPLING], ARGMAX, FILTERED),
        [
            argmax,
            lambda x: _sample(x, batch, drawn, filtered=False),
            lambda x: _sample(x, batch, drawn, filtered=True),
        ],
        choices,
    )
    nothing = _no_logprobs(len(logits))
    return sampled, lax.cond(batch.mode[LOGPROBS] > 0, lambda: _logprobs(logits, sampled, batch), lambda: nothing)


def is_plain(mode: Int32[Array, " 5"]) -> Bool[Array, ""]:
    """Whether `sample_plain` suffices for a batch."""
    return (mode[SAMPLING] < FILTERED) & (mode[PENALTY] + mode[LOGPROBS] + mode[MASK] == 0)


def sample_plain(
    logits: Float32[Array, "C V"], batch: Batch, drawn: DraftDistributions, rows: int
) -> tuple[Int32[Array, " {rows}"], Logprobs]:
    """`sample` without filters, penalties, masks and log-probabilities, which take long to compile. Results are padded
    to `rows` rows."""
    sampled = lax.cond(
        batch.mode[SAMPLING] > ARGMAX, lambda x: _sample(x, batch, drawn, filtered=False), argmax, logits
    )
    return jnp.pad(sampled, (0, rows - len(sampled))), _no_logprobs(rows)


def _no_logprobs(count: int) -> Logprobs:
    return Logprobs(
        jnp.zeros(count),
        jnp.zeros((count, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((count, MAX_LOGPROBS)),
        jnp.zeros(count),
    )


def _logprobs(logits: Float32[Array, "C V"], sampled: Int32[Array, " C"], batch: Batch) -> Logprobs:
    logprobs = jax.nn.log_softmax(logits, -1)
    width = min(MAX_LOGPROBS, logits.shape[-1])
    likeliest, ids = top(logprobs, width)
    pad = ((0, 0), (0, MAX_LOGPROBS - width))

    def logprob_of(token: Int32[Array, " C"]) -> Float32[Array, " C"]:
        return jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]

    return Logprobs(
        logprob_of(sampled),
        jnp.pad(ids, pad),
        jnp.pad(likeliest, pad, constant_values=-jnp.inf),
        logprob_of(batch.following),
    )


def exponential_noise(
    seed: Int32[Array, "C 2"], position: Int32[Array, " C"], vocab: int
) -> Float32[Array, "C {vocab}"]:
    """Exponential random numbers, one per token of the vocabulary, for `position` of the request with key `seed`.

    Threefry derives a key from (seed, position). An integer hash with good avalanche ("lowbias32") combines key and
    token, at a tenth of Threefry's cost for 49,152 tokens.
    """

    def key_of(words: Int32[Array, " 2"], position: Int32[Array, ""]) -> UInt32[Array, " 2"]:
        key = jax.random.wrap_key_data(words.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    keys = jax.vmap(key_of)(seed, position)  # [C, 2] uint32
    x = jnp.arange(vocab, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9) ^ keys[:, :1]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x = (x ^ (x >> 16)) + keys[:, 1:]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    x ^= x >> 16
    # Unlikely tokens win by small numbers: take those from the low end of [0, 1), where float32 is finest.
    fraction = jnp.minimum((x.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-fraction)


def _sample(
    logits: Float32[Array, "C V"], batch: Batch, drawn: DraftDistributions, filtered: bool
) -> Int32[Array, " C"]:
    greedy = batch.temperature < GREEDY_BELOW
    weights = tempered(logits, jnp.where(greedy, 1.0, batch.temperature))
    if filtered:
        weights = jnp.where(keep(weights, batch.top_k, batch.top_p, batch.min_p), weights, 0.0)
    position = batch.position.at[batch.logit_node].get(mode="clip") + 1
    clock = exponential_noise(batch.seed, position, logits.shape[-1])
    if batch.children.shape[1]:
        residual, child = verify(weights, batch, drawn)
        token = jnp.where(child >= 0, child, exponential_race(residual, clock))
    else:
        token = exponential_race(weights, clock)
    return jnp.where(greedy, argmax(logits), token)


def tempered(logits: Float32[Array, "C V"], temperature: Float32[Array, " C"]) -> Float32[Array, "C V"]:
    """Unnormalised probabilities at these temperatures. The largest of a row is exactly 1, which the filters rely on.

    The largest logit is subtracted first. Of `logits / temperature - max`, XLA makes a multiplication and subtraction
    with one rounding, for some shapes only: off by 2e-6 at 0.7, and more at lower temperatures.
    """
    return jnp.exp((logits - jnp.max(logits, -1, keepdims=True)) * (1 / temperature)[:, None])


def exponential_race(weights: Float32[Array, "C V"], clock: Float32[Array, "C V"]) -> Int32[Array, " C"]:
    """The token with the smallest clock / weight, for clocks from `exponential_noise`: an exponential race.

    Token i wins with probability weights[i] / Σ weights. Equal to the Gumbel-max trick, without its logarithms.
    """
    return argmax(weights / clock)


def argmax(x: Float32[Array, "C V"]) -> Int32[Array, " C"]:
    """Index of each row's largest value, the first of equals.

    Works in blocks: XLA on CPU vectorises max but not argmax, which takes twenty times as long.
    """
    blocks = _blocks(x)
    return _largest(blocks, jnp.max(blocks, -1)).place


def top(x: Float32[Array, "C V"], count: int) -> tuple[Float32[Array, "C count"], Int32[Array, "C count"]]:
    """The `count` largest values of each row and their indices, largest first; of equals the first ones. Values must be
    above -inf to count.

    One maximum after another. `lax.top_k` takes longer on CPU, and becomes a sort by CUB on NVIDIA GPUs, which
    no CUDA graph can hold: even in a branch that does not run, the host waits for the step's logits before it launches
    the rest.
    """
    blocks, rows = _blocks(x), jnp.arange(x.shape[0])

    def take(
        i: Int32[Array, ""], state: tuple[Array, Array, Float32[Array, "C count"], Int32[Array, "C count"]]
    ) -> tuple[Array, Array, Float32[Array, "C count"], Int32[Array, "C count"]]:
        blocks, best, values, indices = state
        found = _largest(blocks, best)
        rest = found.inside.at[rows, found.place % _BLOCK].set(-jnp.inf)
        block = found.place // _BLOCK
        value = jnp.max(found.inside, -1)
        blocks, best = blocks.at[rows, block].set(rest), best.at[rows, block].set(jnp.max(rest, -1))
        return blocks, best, values.at[:, i].set(value), indices.at[:, i].set(found.place)

    nothing = jnp.zeros((x.shape[0], count), x.dtype), jnp.zeros((x.shape[0], count), jnp.int32)
    _, _, values, indices = lax.fori_loop(0, count, take, (blocks, jnp.max(blocks, -1), *nothing))
    return values, indices


class _Largest(NamedTuple):
    """Each row's largest value: its place in the row, and the block that holds it."""

    place: Int32[Array, " C"]
    inside: Float32[Array, "C block"]


def _blocks(x: Float32[Array, "C V"]) -> Float32[Array, "C blocks block"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK)), constant_values=-jnp.inf).reshape(x.shape[0], -1, _BLOCK)


def _largest(blocks: Float32[Array, "C blocks block"], best: Float32[Array, "C blocks"]) -> _Largest:
    """`best`: the largest value of each block."""
    block = jnp.argmax(best, -1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1, mode="promise_in_bounds")[:, 0]
    return _Largest((block * _BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32), inside)


def keep(
    weights: Float32[Array, "C V"],
    top_k: Int32[Array, " C"],
    top_p: Float32[Array, " C"],
    min_p: Float32[Array, " C"],
) -> Bool[Array, "C V"]:
    """Tokens that pass the filters. `weights` are unnormalised probabilities, the largest of a row is 1.

    Top-k first, then top-p of the remaining tokens, then min-p. Thresholds are found by bisection on the float's bits
    (31 comparisons, exact) instead of a sort, which takes XLA on CPU several milliseconds per row. All tokens tied at a
    threshold are kept.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)  # non-negative floats are ordered like their bits

    def threshold(
        enough: Int32[Array, " C"] | Float32[Array, " C"],
        measure: Int32[Array, "C V"] | Float32[Array, "C V"],
        live: Bool[Array, "C V"],
    ) -> Int32[Array, " C"]:
        """Largest bit pattern b such that Σ measure over live tokens with bits ≥ b is still ≥ enough."""

        def halve(
            _: Int32[Array, ""], bounds: tuple[Int32[Array, " C"], Int32[Array, " C"]]
        ) -> tuple[Int32[Array, " C"], Int32[Array, " C"]]:
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
    live &= (bits >= nucleus[:, None]) | (top_p >= 1)[:, None]  # 1 keeps all, whatever the rounding
    return live & (weights >= min_p[:, None])
