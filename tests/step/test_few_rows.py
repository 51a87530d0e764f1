"""Steps with few logit rows compute the head and sample for those only, with the same results."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from jaxspec.compilation import compile_ahead
from jaxspec.kernels import cpu
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.masks import MaskBuffers, mask_of, words
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import SamplingInputs, Tree, pack
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import StepResult, make_step, split

PAGE, PAGES, FEW = 16, 8, 4
SHAPE = BatchShape(32, 16, 4, 2)
BUFFERS = BatchBuffers([SHAPE])


class FewRows(NativeLayers):
    few_rows = FEW


class AllRows(NativeLayers):
    few_rows = 0


@lru_cache
def step_of(layers: type[NativeLayers]) -> Any:
    """A compiled step, as a function of the batch's buffer and masks."""
    cpu.load()
    loaded = tiny.model(None)
    graph, treedef, leaves = split(layers().decoder(loaded.config, loaded.weights, "float32"))
    vocab = loaded.config.vocab_size
    table, drawn = PenaltyTable.empty(2, vocab), DraftDistributions.empty()
    table = table._replace(bias=table.bias + jnp.arange(vocab) % 5)
    masks = MaskBuffers(vocab).shape(SHAPE.rows)

    def cache() -> KVCache:
        return KVCache.zeros(loaded.config, PAGES, PAGE, "float32")

    buffer = jnp.zeros(SHAPE.size, jnp.int32)
    compiled = compile_ahead(make_step(graph, treedef, SHAPE, layers()), leaves, cache(), table, drawn, buffer, masks)
    return lambda buffer, masks: compiled(leaves, cache(), table, drawn, buffer, masks)[1]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_few_rows_have_the_same_results(data: Any, seed: int) -> None:
    rng, vocab = np.random.default_rng(seed), tiny.model(None).config.vocab_size
    trees: list[Tree] = []
    used, plain = 0, data.draw(st.booleans())
    for i in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, 8))
        rows = data.draw(st.integers(0, min(count, 3)))
        sampling = SamplingInputs(
            temperature=data.draw(st.sampled_from([0.0, 0.7])),
            top_p=1.0 if plain else data.draw(st.sampled_from([0.5, 1.0])),
            seed=(seed % 1000, i), logprobs=not plain and data.draw(st.booleans()),
        )  # fmt: skip
        masks = None
        if rows and not plain and data.draw(st.booleans()):
            masks = np.stack([mask_of(rng.random(vocab) < 0.5) for _ in range(rows)])
        tokens = [int(t) for t in rng.integers(vocab, size=count)]
        pages = np.asarray([2 * i, 2 * i + 1], np.int32)
        penalty_row = None if plain else data.draw(st.sampled_from([None, 1]))
        trees.append(Tree.chain(tokens, 0, pages, sampling, rows=rows, penalty_row=penalty_row, masks=masks))
        used += rows
    packed = pack(trees, [SHAPE], BUFFERS, PAGE, masks=MaskBuffers(vocab))
    masks = np.zeros((SHAPE.rows + 1, words(vocab)), np.uint32) if packed.masks is None else packed.masks
    few, all_rows = (step_of(layers)(packed.buffer.copy(), masks) for layers in (FewRows, AllRows))
    _compare(few, all_rows, used)
    if plain and used <= FEW:  # the rest was not computed
        assert not np.asarray(few.decision)[FEW : SHAPE.rows].any()


def _compare(few: StepResult, all_rows: StepResult, used: int) -> None:
    sampled, accepted = np.split(np.asarray(few.decision), [SHAPE.rows])
    expected, all_accepted = np.split(np.asarray(all_rows.decision), [SHAPE.rows])
    np.testing.assert_array_equal(sampled[:used], expected[:used])
    np.testing.assert_array_equal(accepted, all_accepted)
    chex.assert_trees_all_equal_shapes(few.logprobs, all_rows.logprobs)
    for a, b in zip(few.logprobs, all_rows.logprobs, strict=True):  # XLA's sums depend on the shape
        np.testing.assert_allclose(np.asarray(a)[:used], np.asarray(b)[:used], rtol=1e-4, atol=1e-5)
