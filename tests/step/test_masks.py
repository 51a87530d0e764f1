"""Token masks in the step: what they forbid, and how they are packed."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.masks import MaskBuffers, forbid, mask_of, words
from jaxspec.step.packing import SamplingInputs, Tree, pack
from jaxspec.step.sampler import MASK


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), vocab=st.integers(1, 100), rows=st.integers(1, 5))
def test_masked_logits_are_gone_and_others_stay(seed: int, vocab: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((rows, vocab)) < 0.5
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    masks = np.concatenate([np.zeros((1, words(vocab)), np.uint32), [mask_of(a) for a in allowed]])
    mask_row = rng.integers(0, rows + 1, rows).astype(np.int32)
    found = np.asarray(forbid(jnp.asarray(logits), jnp.asarray(mask_row), jnp.asarray(masks)))
    chex.assert_shape(found, (rows, vocab))
    for r, mask in enumerate(mask_row):
        kept = allowed[mask - 1] if mask else np.ones(vocab, bool)
        np.testing.assert_array_equal(found[r], np.where(kept, logits[r], -np.inf))


def test_packing_gives_the_last_rows_of_a_tree_their_masks() -> None:
    shape = BatchShape(16, 8, 4, 2)
    buffers, masks = BatchBuffers([shape]), MaskBuffers(70)
    pages, own = np.arange(2, dtype=np.int32), np.arange(6, dtype=np.uint32).reshape(2, 3)
    free = Tree.chain([1, 2, 3], 0, pages, SamplingInputs(), rows=2)
    bound = Tree.chain([4, 5, 6], 0, pages, SamplingInputs(), rows=3, masks=own)
    packed = pack([free, bound, free], [shape], buffers, 16, masks=masks)
    assert packed.masks is not None
    batch = Batch(*(packed.buffer[shape.layout[n][0] :][: int(np.prod(shape.layout[n][1]))] for n in Batch._fields))
    assert batch.mask_row.tolist() == [0, 0, 0, 1, 2, 0, 0, 0] and batch.mode[MASK] == 1
    np.testing.assert_array_equal(packed.masks[1:3], own)
    assert pack([free], [shape], buffers, 16, masks=masks).masks is None
