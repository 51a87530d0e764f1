"""Padded verification (SPIN, Fig. 5 and 9): every request has a row as long as the longest one's.

A reference to compare the engine with, not part of it. It uses the engine's weights, matrix products and attention
kernel, so only the padding differs: padding positions are read and scored like the others. Dense attention by XLA over
a padded array is slower and would be an easier reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import Decoder
from jaxspec.models.drafter import DraftDecoder
from jaxspec.step.attention import Earlier
from jaxspec.step.batch import Batch
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.layers import NewKV
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import Tree

#: Token of padding nodes. It is never sampled, so padding nodes are never accepted and their KV is never stored.
NO_TOKEN = -1


class PaddedLayers(NativeLayers):
    """Attention over as many positions per request as the longest of the batch has committed (`Layers`).

    Each request has contiguous pages, enough for the longest one. Keys of padding positions must be NaN and values
    finite: a NaN score is never the maximum and has weight exactly 0, so the kernel masks padding at no cost. Does not
    support sliding windows, which would be relative to the end of the padding.
    """

    name = "padded"

    def run(
        self,
        model: Decoder | DraftDecoder,
        x: jax.Array,
        kv_cache: AnyKVCache,
        batch: Batch,
        mask: jax.Array,
        earlier: Earlier | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[jax.Array, NewKV, jax.Array]:
        longest = jnp.full_like(batch.committed, jnp.max(batch.committed))
        return super().run(model, x, kv_cache, batch._replace(committed=longest), mask, earlier, taps)

    def positions_read(self, committed: np.ndarray, page_size: int) -> int:
        return super().positions_read(np.full_like(committed, committed.max()), page_size)


def widened(trees: Sequence[Tree], width: int) -> list[Tree]:
    """The trees padded to `width` nodes each, with logits of all nodes: the query tensor `[requests, width]`.

    Padding nodes are children of the root that are never accepted.
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
