"""Upper bounds of the device memory that steps and draft rounds need for intermediate arrays, without compiling them.

XLA places the intermediate arrays of a program in one allocation. Some live until the end of the program, because the
commit reads them. The others live in one phase: a layer's attention, its MLP, sampling, the commit. Phases reuse the
same memory, so the bound is the long-lived arrays plus the largest phase.

The sizes follow what XLA does on GPUs. For steps compiled for H200, A100 and L4 the bound is 1.0 to 2 times XLA's own
`memory_analysis().temp_size_in_bytes` (tests/step/test_temporaries.py has the table).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.models.config import DecoderConfig
from jaxspec.step import work_items
from jaxspec.step.attention import BLOCK
from jaxspec.step.batch import BatchShape

#: Multiprocessors of an H100 or H200, if the device does not say how many it has.
CORES = 132
#: A product with few tiles `[64, 64]` of outputs is split along its inner dimension; the parts are summed later: not
#: with more than 2.25 tiles per multiprocessor, else up to 6 parts of tiles for each, of at least 128 terms, or 1024 if
#: the tiles alone occupy three quarters of them. Fitted to what XLA chooses without autotuning.
_TILE, _MOST_TILES, _MOST_PARTS, _FEWEST_TERMS, _MORE_TERMS = 64, 2.25, 6, 128, 1024
#: Arrays `[C, V]` float32 alive at once in sampling: logits, penalised and masked ones, noise, filters.
_SAMPLING_COPIES = 4.0
#: The same for rejection sampling, and more for each draft child of a node.
_REJECTION_COPIES, _REJECTION_PER_CHILD = 5.5, 1.1
#: Arrays `[R W, V']` float32 alive at once when a level of a tree grows, besides those of the roots.
_DRAFT_COPIES = 1.2
#: Copies of the written pages' keys in the commit of an INT8 cache; values are as large and included.
_INT8_COPIES = 5
#: Small arrays, and gaps between arrays.
_MARGIN = 1.1


@dataclass(frozen=True)
class Program:
    """What the sizes of a model's programs depend on. `kernel`: attention is the GPU kernel, not XLA operations;
    `cores`: multiprocessors of the device."""

    model: DecoderConfig
    dtype: str
    page_size: int
    kernel: bool
    cores: int = CORES

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def step_bytes(self, shape: BatchShape) -> int:
        """Upper bound of the temporaries of a target step of this shape."""
        c = self.model
        copies = _REJECTION_COPIES + _REJECTION_PER_CHILD * shape.children if shape.children else _SAMPLING_COPIES
        sampling = copies * shape.rows * c.vocab_size * 4 + 2 * shape.tokens * c.hidden_size * self.itemsize
        # The open pages of an INT8 cache are copied before sampling.
        early, late = self._int8_commit(shape)
        return int(_MARGIN * (self._kept(shape.tokens) + max(self._layers(shape), early + sampling, late)))

    def round_bytes(self, shape: BatchShape, vocab: int, width: int, depth: int) -> int:
        """Upper bound of the temporaries of a draft round: chains of this shape, then trees of `depth` levels with
        `width` nodes each, over `vocab` tokens."""
        c, nodes = self.model, shape.trees * width
        chains = self._kept(shape.tokens) + self._layers(shape)
        level = BatchShape(
            shape.tokens, nodes, nodes, shape.pages
        )  # every node is a tree; tiles are those of the chains
        # A loop keeps the tree's KV, and writes a new copy of it in each level.
        tree = 2 * 2 * c.num_layers * shape.trees * depth * width * c.kv_size * self.itemsize
        tables = 2 * nodes * shape.pages * 4
        logits = (_DRAFT_COPIES * nodes + shape.trees) * vocab * 4
        levels = tree + tables + self._kept(nodes) + max(self._layers(level), logits)
        return int(_MARGIN * max(chains, levels))

    def _kept(self, tokens: int) -> float:
        """What the commit reads of all layers. With the kernel: queries, keys and values. Without: the products'
        outputs, and keys again, with rotary embeddings."""
        c, width = self.model, self.model.q_size + 2 * self.model.kv_size
        layer = tokens * width * self.itemsize
        if not self.kernel:
            layer = max(layer, self._parts(tokens, width, c.hidden_size)) + tokens * c.kv_size * self.itemsize
        return c.num_layers * layer

    def _parts(self, tokens: int, width: int, inner: int) -> int:
        """Bytes of the parts of a product `[tokens, inner] x [inner, width]`; 0 if it is not split."""
        tiles = -(-tokens // _TILE) * -(-width // _TILE)
        terms = _FEWEST_TERMS if tiles < 0.75 * self.cores else _MORE_TERMS
        parts = min(_MOST_PARTS * self.cores // tiles, inner // terms)
        if tiles > _MOST_TILES * self.cores or parts < 2:
            return 0
        return tokens * width * 4 * 2 ** (parts.bit_length() - 1)

    def _layers(self, shape: BatchShape) -> float:
        """The larger of a layer's attention and its MLP."""
        c, t = self.model, shape.tokens
        mlp = t * (3 * c.intermediate_size + 4 * c.hidden_size) * self.itemsize
        mlp += self._parts(t, c.hidden_size, c.intermediate_size)
        if (e := c.experts) is not None:  # rows by expert, and for each expert a masked copy of them
            rows = t * e.chosen
            mlp = rows * (3 * e.width + 4 * c.hidden_size) * 4 + e.count * rows * max(c.hidden_size, e.width) * 4
            mlp += t * 3 * e.shared_width * 4
        return max(self._attention(shape), mlp)

    def _attention(self, shape: BatchShape) -> float:
        c, t = self.model, shape.tokens
        if self.kernel:
            rows = work_items.most_rows(t, c.num_heads // c.num_kv_heads, shape.pages, self.page_size)
            # Each item's outputs and log-sum-exp; queries before and after rotation, and the merged output.
            return rows * c.num_kv_heads * (c.head_dim + 1) * 4 + 6 * t * c.q_size * self.itemsize
        scores = 1.5 * c.num_heads * t * max(t, BLOCK) * 4  # scores and their masked copy
        return scores + 6 * t * c.q_size * 4  # partial outputs of the parts that are merged

    def _int8_commit(self, shape: BatchShape) -> tuple[int, int]:
        """Unquantised copies of the written pages: before sampling, and in the commit, with the new KV."""
        if not shape.written:
            return 0, 0
        c = self.model
        position = c.num_layers * c.kv_size * self.itemsize
        pages = shape.written * self.page_size
        return position * 2 * pages, position * (_INT8_COPIES * pages + 2 * shape.tokens)
