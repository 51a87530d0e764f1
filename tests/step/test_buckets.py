"""The steps that are compiled, and which of them a batch gets."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.step.batch import BatchBuffers
from jaxspec.step.buckets import CPU, GPU, StepSizes, needed_first, step_buckets
from jaxspec.step.packing import SamplingInputs, Tree, pack

#: Pages of a request of 131,072 tokens, the context of Llama 3.1.
LONG = 131_072 // 32


def tree(pages: int, page_size: int = 32) -> Tree:
    return Tree.chain([7], pages * page_size - 1, np.arange(pages, dtype=np.int32), SamplingInputs())


@pytest.mark.parametrize("most", [512, 2048, 8192])
def test_a_gpu_compiles_few_programs(most: int) -> None:
    shapes = step_buckets(most, 64, LONG, sizes=GPU)
    assert len(shapes) == len(set(shapes)) <= 24
    assert [s.tokens for s in shapes] == sorted(s.tokens for s in shapes)
    assert shapes[-1].capacity == (most, 512, 64, LONG)
    first = needed_first(shapes)
    assert first[0] == shapes[0] and first[-1] == shapes[-1] and [s.tokens for s in first] == [16, 64, most]


def test_a_decoding_step_sends_little_to_a_gpu() -> None:
    shapes = step_buckets(8192, 64, LONG, sizes=GPU)
    decoding = [s for s in shapes if s.pages == 64]
    assert [s.tokens for s in decoding] == [16, 32, 64, 128, 256, 512]
    assert all(4 * s.size <= 64 * 1024 for s in decoding)


def test_every_draft_of_a_step_can_be_verified_on_a_gpu() -> None:
    assert all(s.rows == min(s.tokens, 512) for s in step_buckets(8192, 64, LONG, sizes=GPU))
    assert [s.rows for s in step_buckets(256, 8, 256, [16, 256], sizes=CPU)] == [16, 64]
    assert step_buckets(256, 100, 256, [256], sizes=CPU)[0].rows == 100


def test_a_batch_gets_the_smallest_page_table_that_holds_it() -> None:
    shapes = step_buckets(64, 4, 40, [16, 64], sizes=StepSizes((16, 64), 64, (4, 8), 16))
    assert [(s.tokens, s.pages) for s in shapes] == [(16, 4), (16, 8), (16, 40), (64, 40)]
    buffers = BatchBuffers(shapes)
    assert [pack([tree(n), tree(1)], shapes, buffers, 32).shape.pages for n in (1, 4, 5, 8, 9, 40)] == [
        4,
        4,
        8,
        8,
        40,
        40,
    ]
    with pytest.raises(ValueError, match="41 pages exceed the largest step"):
        pack([tree(41)], shapes, buffers, 32)
