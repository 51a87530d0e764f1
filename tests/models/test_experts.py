"""Choosing experts and grouping rows by them, without sorting, against NumPy's sorts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.models.experts import choose, places


@settings(max_examples=30)
@given(rows=st.integers(1, 4), experts=st.integers(1, 6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_largest_shares_are_chosen_and_of_equals_the_first(
    rows: int, experts: int, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, experts))
    share = np.random.default_rng(seed).choice([0.0, 0.25, 0.5], size=(rows, experts)).astype(np.float32)
    values, indices = choose(jnp.asarray(share), count)
    expected = np.argsort(-share, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(share, expected, -1))


def test_experts_of_tokens_that_are_not_numbers_exist() -> None:
    _, indices = choose(jnp.full((2, 3), jnp.nan), 2)
    assert ((indices >= 0) & (indices < 3)).all()


@settings(max_examples=30)
@given(expert=st.lists(st.integers(0, 4), min_size=1, max_size=9), unused=st.integers(0, 2))
def test_rows_of_an_expert_stand_together_in_their_order(expert: list[int], unused: int) -> None:
    place, counts = places(jnp.asarray(expert, jnp.int32), 5 + unused)
    np.testing.assert_array_equal(np.argsort(place), np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(counts, np.bincount(expert, minlength=5 + unused))
