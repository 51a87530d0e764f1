"""Filters against their definitions by sorting; sampling against the distribution it is meant to follow."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.step.sampler import exponential_noise, exponential_race, keep, tempered, top

VOCAB = 300
_top = jax.jit(top, static_argnums=1)
_keep, _clocks = jax.jit(chex.assert_max_traces(keep, n=1)), jax.jit(exponential_noise, static_argnums=2)


@jax.jit
def _draw(weights: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    return exponential_race(weights[None], exponential_noise(seeds, positions, VOCAB))


def expected_keep(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filters by their definitions, on a row without ties."""
    order = np.argsort(-weights)
    alive = order[: top_k or VOCAB]
    mass = np.cumsum(weights[alive].astype(np.float64))
    alive = alive[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    out = np.zeros(VOCAB, bool)
    out[alive[weights[alive] >= min_p]] = True
    return out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, VOCAB), st.floats(0.05, 1.0), st.floats(0, 0.9))
def test_filters_equal_their_definitions(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(2, VOCAB)).astype(np.float32) * 3
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rows = [np.full(2, x) for x in (np.int32(top_k), np.float32(top_p), np.float32(min_p))]
    kept = np.asarray(_keep(jnp.asarray(weights), *(jnp.asarray(r) for r in rows)))
    for row, got in zip(weights, kept, strict=True):
        want = expected_keep(row, top_k, float(np.float32(top_p)), float(np.float32(min_p)))
        # Sums in another order may decide the last token of the nucleus otherwise.
        assert (got != want).sum() <= 1
        assert got[row.argmax()]


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_the_likeliest_token_has_weight_one_at_every_temperature(rows: int) -> None:
    """With `min_p: 1` it is the only one left. It once had 0.999998 in small batches, and token 0 was sampled."""
    rng, weigh = np.random.default_rng(rows), jax.jit(tempered)
    for low in (1e-4, 0.1, 0.7):
        logits = rng.normal(size=(rows, VOCAB)).astype(np.float32) * 20
        temperature = np.float32(low) * rng.uniform(1, 3, rows).astype(np.float32)
        weights = np.asarray(weigh(logits, temperature))
        assert (weights.max(-1) == 1).all() and (weights.argmax(-1) == logits.argmax(-1)).all()
        wide = logits.astype(np.float64)
        exact = np.exp((wide - wide.max(-1, keepdims=True)) / temperature[:, None])
        np.testing.assert_allclose(weights, exact, rtol=3e-5, atol=1e-12)
        nothing = np.zeros(rows, np.int32), np.ones(rows, np.float32), np.ones(rows, np.float32)
        assert np.asarray(jax.jit(keep)(weights, *nothing)).sum() == rows


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1, 127, 128, 129, VOCAB]), st.integers(2, 500))
def test_top_is_the_head_of_a_stable_sort(seed: int, size: int, different: int) -> None:
    """Also with ties and with as many as there are."""
    rows = np.random.default_rng(seed).integers(different, size=(3, size)).astype(np.float32) - different
    count = min(20, size)
    values, indices = _top(jnp.asarray(rows), count)
    expected = np.argsort(-rows, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, 1))


def test_samples_follow_the_weights() -> None:
    """Chi-square of 40,000 draws over 12 tokens, one filtered out; and of the rare ones among 300."""
    draws = 40_000
    weights = np.zeros(VOCAB, np.float32)
    weights[:12] = [1, 0.5, 0.25, 0.1, 0, 0.05, 0.02, 0.9, 0.7, 0.3, 0.01, 0.4]
    seeds = jnp.asarray(np.stack([np.full(draws, 11), np.full(draws, 3)], 1), jnp.int32)
    picked = _draw(jnp.asarray(weights), seeds, jnp.arange(draws))
    counts = np.bincount(picked, minlength=VOCAB)
    expected = draws * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    assert scipy.stats.chisquare(counts[some], expected[some]).pvalue > 1e-3

    weights = np.full(VOCAB, 1e-5, np.float32)
    weights[7] = 1
    rare = (_draw(jnp.asarray(weights), seeds, jnp.arange(draws)) != 7).sum()
    assert abs(rare - draws * 299e-5 / (1 + 299e-5)) < 4 * np.sqrt(draws * 299e-5)


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    seeds = np.asarray([[1, 0], [1, 0], [2, 0], [1, 1]], np.int32)
    noise = np.asarray(_clocks(jnp.asarray(seeds), jnp.asarray([5, 6, 5, 5]), 5000))
    chex.assert_shape(noise, (4, 5000))
    chex.assert_type(noise, jnp.float32)
    np.testing.assert_array_equal(noise[:1], _clocks(jnp.asarray(seeds[:1]), jnp.asarray([5]), 5000))
    for i in range(4):
        assert scipy.stats.kstest(noise[i], "expon").pvalue > 1e-3
        for j in range(i):
            assert abs(np.corrcoef(noise[i], noise[j])[0, 1]) < 0.06
        assert abs(np.corrcoef(noise[i, 1:], noise[i, :-1])[0, 1]) < 0.06
