"""The mask of token trees and acceptance, against walking the parents."""

from itertools import pairwise

import chex
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import forests
from jaxspec.step.tree import accept, ancestors


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_mask_and_acceptance_equal_a_walk_over_parents(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = [forests.random_parents(rng, n) for n in sizes]
    first = np.cumsum([0, *sizes])
    total = 48  # one shape for all examples
    subtree = np.ones(total, np.int32)
    token, sampled = rng.integers(3, size=total), rng.integers(3, size=total)
    known, parent = np.ones(total, np.int32), np.zeros(total, np.int32)
    for parents, base in zip(trees, first, strict=False):
        subtree[base : base + len(parents)] = forests.subtree_sizes(parents)
        for i, p in enumerate(parents[1:], start=1):
            known[base + i], parent[base + i] = 0, base + p

    mask = np.asarray(ancestors(jnp.asarray(subtree)))
    chex.assert_shape(mask, (total, total))
    token_, known_, parent_, sampled_ = (jnp.asarray(x, jnp.int32) for x in (token, known, parent, sampled))
    accepted = np.asarray(accept(token_, known_, parent_, sampled_, jnp.asarray(mask)))

    expected = np.eye(total, dtype=bool)
    for parents, base in zip(trees, first, strict=False):
        for i in range(len(parents)):
            path = [base + p for p in forests.path_to(parents, i)]
            expected[base + i, path] = True
            assert accepted[base + i] == all(token[b] == sampled[a] for a, b in pairwise(path))
    np.testing.assert_array_equal(mask, expected)
