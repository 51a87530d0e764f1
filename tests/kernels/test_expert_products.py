"""The GPU's products with experts against float64. Interpreted without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.kernels import expert_products

pytestmark = pytest.mark.gpu

INTERPRET = jax.default_backend() != "gpu"
multiply = jax.jit(expert_products.multiply, static_argnums=(2, 5))


def product(x: np.ndarray, weight: np.ndarray, counts: list[int], dtype: str = "float32") -> np.ndarray:
    found = multiply(jnp.asarray(x, dtype), jnp.asarray(weight, dtype), weight.shape[2], None,
                     jnp.asarray(counts, jnp.int32), INTERPRET)  # fmt: skip
    return np.asarray(found)


def expected(x: np.ndarray, weight: np.ndarray, counts: list[int]) -> np.ndarray:
    expert = np.repeat(np.arange(len(counts)), counts)
    return np.einsum("nk,nko->no", x.astype(np.float64), weight.astype(np.float64)[expert])


@pytest.mark.slow
@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=9), tile=st.sampled_from([16, 32, 64]))
def test_every_row_is_in_one_tile_of_its_expert(counts: list[int], tile: int) -> None:
    rows = sum(counts)
    tiles = expert_products.plan(jnp.asarray(counts, jnp.int32), rows, tile)
    found = np.full(rows, -1)
    for expert, begin, end in zip(*map(np.asarray, tiles), strict=True):
        if begin < end:
            there = slice(begin, min(begin + tile, end))
            assert (found[there] == -1).all()
            found[there] = expert
    np.testing.assert_array_equal(found, np.repeat(np.arange(len(counts)), counts))


@pytest.mark.parametrize(
    ("counts", "depth", "width"),
    [([5], 64, 64), ([9, 0, 20, 2], 96, 100), ([0, 0, 1], 7, 3), ([40, 17, 0, 16], 130, 65), ([600, 3], 32, 16)],
)
def test_rows_are_multiplied_by_their_experts(counts: list[int], depth: int, width: int) -> None:
    rng = np.random.default_rng(depth)
    x = rng.normal(size=(sum(counts), depth)).astype(np.float32)
    weight = rng.normal(size=(len(counts), depth, width)).astype(np.float32)
    np.testing.assert_allclose(product(x, weight, counts), expected(x, weight, counts), atol=1e-4)
    half, halves = (np.asarray(jnp.asarray(a, "bfloat16"), np.float32) for a in (x, weight))
    np.testing.assert_allclose(product(x, weight, counts, "bfloat16"), expected(half, halves, counts), atol=1e-4)


def test_experts_without_rows_are_not_used_and_rows_do_not_depend_on_others() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(31, 80)).astype(np.float32)
    weight = rng.normal(size=(5, 80, 48)).astype(np.float32)
    weight[1] = weight[4] = np.nan
    counts = [9, 0, 20, 2, 0]
    out = product(x, weight, counts)
    assert np.isfinite(out).all()
    for row, expert in ((0, 0), (8, 0), (9, 2), (30, 3)):
        alone = product(x[row : row + 1], weight, [int(e == expert) for e in range(5)])
        np.testing.assert_array_equal(out[row], alone[0])
