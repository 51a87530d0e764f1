"""Filters and inverse-CDF sampling against their definitions by sorting and summing."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.step.choose import inverse_cdf, keep, uniform

VOCAB = 300
_keep, _inverse, _uniform = jax.jit(keep), jax.jit(inverse_cdf), jax.jit(uniform)


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


def test_inverse_cdf_equals_a_running_sum() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((64, VOCAB)).astype(np.float32) ** 8
    weights[rng.random(weights.shape) < 0.5] = 0
    u = rng.random(64).astype(np.float32)
    picked = np.asarray(_inverse(jnp.asarray(weights), jnp.asarray(u)))
    sums = np.cumsum(weights.astype(np.float64), -1)
    for i, index in enumerate(picked):
        assert weights[i, index] > 0
        below = sums[i, index - 1] if index else 0.0
        assert below - 1e-4 <= u[i] * sums[i, -1] <= sums[i, index] + 1e-4


def test_inverse_cdf_never_picks_what_was_filtered_out() -> None:
    weights = np.zeros((3, VOCAB), np.float32)
    weights[:, 5] = weights[:, 260] = 1
    u = np.asarray([0.0, 0.49, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    assert np.asarray(_inverse(jnp.asarray(weights), jnp.asarray(u))).tolist() == [5, 5, 260]


def test_uniforms_are_uniform_and_keyed_by_seed_and_position() -> None:
    seeds = np.stack([np.arange(4000) % 7, np.zeros(4000)], 1).astype(np.int32)
    places = np.arange(4000, dtype=np.int32)
    u = np.asarray(_uniform(jnp.asarray(seeds), jnp.asarray(places)))
    assert len(set(u.tolist())) > 3990 and abs(u.mean() - 0.5) < 0.02
    assert np.abs(np.histogram(u, 10, (0, 1))[0] - 400).max() < 80
    again = np.asarray(_uniform(jnp.asarray(seeds[::-1].copy()), jnp.asarray(places[::-1].copy())))
    np.testing.assert_array_equal(again[::-1], u)
