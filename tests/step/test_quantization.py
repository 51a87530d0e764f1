"""Channel-wise INT8: what comes back is within half a step of each channel."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.step.quantization import CHANNEL_BYTES, FARTHEST, Quantized, dequantize, quantize

pytestmark = pytest.mark.gpu

both = jax.jit(lambda x, axis: (q := quantize(x, axis), dequantize(q, axis)), static_argnums=1)


def check(x: np.ndarray, q: Quantized, back: np.ndarray, axis: int) -> None:
    """The bounds of every channel of `x`."""
    chex.assert_shape([q.scale, q.zero], tuple(np.delete(x.shape, axis).tolist()))
    scale, error = np.asarray(q.scale, np.float32), np.abs(x - back)
    spread, far = np.ptp(x, axis), np.abs(x).max(axis)
    rounded = 2e-7 * far + 1e-30  # float32's own
    assert (scale <= 1.01 * np.maximum(spread / 255, far / FARTHEST) + 1e-29).all()
    assert (error.max(axis) <= scale / 2 * (1 + 1e-5) + 2 * rounded).all()
    assert (error.mean(axis) <= scale / 2 * (1 + 1e-5) + 2 * rounded).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_error_bounds_of_every_channel(data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    axis = data.draw(st.sampled_from([-1, -2]))
    x = rng.normal(size=(3, 8, 16) if axis == -1 else (3, 16, 8))
    size = 10.0 ** rng.uniform(-8, 4, x.shape if data.draw(st.booleans()) else np.delete(x.shape, axis))
    offset = 10.0 ** rng.uniform(-8, 4, np.delete(x.shape, axis)) * rng.choice([-1, 0, 1], np.delete(x.shape, axis))
    x = x * (size if size.ndim == 3 else np.expand_dims(size, axis)) + np.expand_dims(offset, axis)
    x = x.astype(np.float32)
    q, back = both(x, axis)
    check(x, q, np.asarray(back), axis)


def test_spread_evenly_the_mean_error_is_a_quarter_of_a_step() -> None:
    x = np.random.default_rng(0).uniform(-3, 5, (4, 2000)).astype(np.float32)
    q, back = both(x, -1)
    mean = np.abs(x - np.asarray(back)).mean(-1) / np.asarray(q.scale, np.float32)
    np.testing.assert_allclose(mean, 0.25, rtol=0.05)


def test_constant_channels_and_what_lies_on_the_grid_come_back() -> None:
    x = np.repeat(np.array([[0.0], [3.25], [-1e4], [1e-6]], np.float32), 16, 1)
    _, back = both(x, -1)
    chex.assert_trees_all_close(back, x, rtol=4e-3 / 32)
    once = both(np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32), -1)[1]
    q, twice = both(once, -1)
    assert (np.abs(np.asarray(twice) - np.asarray(once)) <= np.asarray(q.scale, np.float32)[:, None] / 2).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_is_not_there_does_not_count(data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    there = data.draw(st.integers(0, 16))
    x = rng.normal(size=(5, 16)).astype(np.float32)
    x[:, there:] = data.draw(st.sampled_from([np.nan, np.inf, 1e20, 0.0]))
    q = quantize(jnp.asarray(x), -1, jnp.arange(16) < there)
    back = np.asarray(dequantize(q, -1))
    chex.assert_tree_all_finite(back)
    if there:
        check(x[:, :there], q, back[:, :there], -1)


def test_bytes() -> None:
    q = quantize(jnp.zeros((2, 64, 32)), -1)
    assert q.scale.nbytes + q.zero.nbytes == 2 * 64 * CHANNEL_BYTES
    assert 2 * 64 * 32 * 4 / sum(part.nbytes for part in q) > 3.5
