"""Verification as engines do it that pad (SPIN, Fig. 5 and 9): every request has a row as long as the longest one's.

A reference to measure the engine against, and no part of it. It has the engine's weights, products and attention
kernel, so that what differs is the padding alone: a row's padding is read, scored and weighed like the rest. XLA's own
dot products over one padded array of each layer take longer, so they would be an easier reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.drafter import DraftDecoder
from jaxspec.models.llama import Decoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.layers import NewKV
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Tree

#: Stands in padding nodes: no choice is ever this, so they are never accepted, and nothing of them is stored.
NO_TOKEN = -1


class PaddedLayers(NativeLayers):
    """Each request over as many positions as the longest of the batch has committed. See `jaxspec.step.layers.Layers`.

    Pages of a request lie in a row, enough of them for the longest. Keys of a row's padding must be NaN and its values
    finite: a score that is no number is never the highest and weighs exactly nothing, so the kernel masks padding by
    itself and at no cost. Without a sliding window only, which would hide what is far from the padding's end.
    """

    name = "padded"

    def run(
        self,
        model: Decoder | DraftDecoder,
        x: jax.Array,
        pool: AnyKVCache,
        batch: Batch,
        mask: jax.Array,
        earlier: Earlier | None = None,
    ) -> tuple[jax.Array, NewKV]:
        longest = jnp.full_like(batch.committed, jnp.max(batch.committed))
        return super().run(model, x, pool, batch._replace(committed=longest), mask, earlier)

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return super().positions_read(np.full_like(committed, committed.max()), page_size)


def widened(trees: Sequence[Tree], width: int) -> list[Tree]:
    """The same trees with `width` nodes each, all of which choose: the query tensor `[requests, width]`.

    Padding nodes are drafts below the root, which no choice accepts.
    """
    return [_widened(tree, width - len(tree.token)) for tree in trees]


def _widened(tree: Tree, more: int) -> Tree:
    def padded(values: np.ndarray, padding: int) -> np.ndarray:
        return np.pad(values, (0, more), constant_values=padding)

    subtree = padded(tree.subtree, 1)
    subtree[0] += more
    return replace(
        tree,
        token=padded(tree.token, NO_TOKEN),
        depth=padded(tree.depth, 1),
        subtree=subtree,
        known=padded(tree.known, 0),
        rows=np.arange(len(subtree), dtype=np.int32),
    )
