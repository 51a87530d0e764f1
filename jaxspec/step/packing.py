"""Host-side packing of many token trees into one batch.

The batch only maps trees to pages. Request decomposition (SPIN §V-A) happens in the attention kernel:
`kernels/attention.c` splits a step into work items of one request and one key-value head, each of the request's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.sampling_params import GREEDY_BELOW
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.kv_int8 import OpenPages
from jaxspec.step.masks import MaskBuffers

_ZERO, _ONE = np.zeros(1, np.int32), np.ones(1, np.int32)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of one request (`SamplingParams`) in the form that `Batch` needs."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: tuple[int, int] = (0, 0)
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logprobs: bool = False

    @property
    def mode(self) -> int:
        """Value for `Batch.mode[SAMPLING]`: 0 argmax, 1 sampled, 2 sampled with filters."""
        if self.temperature < GREEDY_BELOW:
            return 0
        return 2 if self.top_p < 1 or self.min_p > 0 or self.top_k > 0 else 1


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's n nodes in preorder, following `committed` positions whose KV is in `pages` (int32).

    token, depth, subtree, known `[n]` int32. `depth` is 0 for the first node: a node's position is committed + depth.
    Known nodes come first and form a chain. `rows`: nodes whose logits are computed, ascending, among them the parent
    of every draft.
    """

    token: np.ndarray
    depth: np.ndarray
    subtree: np.ndarray
    known: np.ndarray
    committed: int
    pages: np.ndarray
    rows: np.ndarray
    sampling: SamplingInputs = field(default_factory=SamplingInputs)
    #: Known token after each logit row, for prompt log-probabilities; None: they are not needed.
    following: np.ndarray | None = None
    #: Row of `PenaltyTable`; None: no penalties.
    penalty_row: int | None = None
    #: Index of each node's parent `[n]`, -1 for the root; None: `parents` derives it from `depth`.
    parent: np.ndarray | None = None
    #: Row of `DraftDistributions` that each draft was drawn from `[n]` int32, siblings in the order they were drawn;
    #: None: drafts are compared with the token sampled at their parent.
    drawn: np.ndarray | None = None
    #: Token masks of the last logit rows `[rows, words]` uint32 (`step.masks`); None: all tokens are allowed.
    masks: np.ndarray | None = None
    #: The request's tree in the step before, if the host does not know its results; -1: none (`Batch.after`).
    after: int = -1

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        committed: int,
        pages: np.ndarray,
        sampling: SamplingInputs,
        rows: int = 1,
        following: np.ndarray | None = None,
        penalty_row: int | None = None,
        masks: np.ndarray | None = None,
        after: int = -1,
    ) -> Tree:
        """A chain of known tokens: a prefill chunk, or the root of plain decoding. The last `rows` are logit rows."""
        n = len(tokens)
        token = np.asarray(tokens, np.int32)
        if n == 1:  # plain decoding: fast path, the device is idle meanwhile
            depth, subtree, known = _ZERO, _ONE, _ONE
        else:
            depth, known = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
            subtree = n - depth
        return cls(
            token, depth, subtree, known, committed, pages, depth[n - rows :], sampling, following, penalty_row,
            masks=masks, after=after,
        )  # fmt: skip

    def parents(self) -> np.ndarray:
        """Index of each node's parent `[n]`, -1 for the root."""
        if self.parent is not None:
            return self.parent
        parent = np.full(len(self.token), -1, np.int32)
        path: list[int] = []
        for i, depth in enumerate(self.depth):
            del path[depth:]
            if path:
                parent[i] = path[-1]
            path.append(i)
        return parent


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed step.

    `nodes[i]` is tree i's first node and `rows[i]` its first logit row: offsets into the two parts of
    `StepResult.decision`.
    """

    shape: BatchShape
    buffer: np.ndarray
    nodes: list[int]
    rows: list[int]
    real_tokens: int
    #: Committed positions of each tree `[trees]`.
    committed: np.ndarray
    #: Whether any tree needs log-probabilities.
    logprobs: bool
    #: Token masks `[logit rows + 1, words]` uint32; None: no row has one.
    masks: np.ndarray | None = None


def pack(
    trees: Sequence[Tree],
    shapes: Sequence[BatchShape],
    buffers: BatchBuffers,
    page_size: int,
    opened: OpenPages | None = None,
    masks: MaskBuffers | None = None,
) -> Packed:
    """Pack trees into the first of `shapes` (ascending) that holds them.

    `opened`: the open pages of a quantised KV cache, else None; `masks`: needed if a tree has any. Raises `ValueError`
    if no shape is large enough.
    """
    tokens = sum(len(t.token) for t in trees)
    rows = sum(len(t.rows) for t in trees)
    pages = max((len(t.pages) for t in trees), default=0)
    needed = tokens, rows, len(trees), pages
    shape = next((s for s in shapes if all(n <= m for n, m in zip(needed, s.capacity, strict=True))), None)
    if shape is None:
        raise ValueError(
            f"{len(trees)} trees of {tokens} tokens, {rows} logit rows and {pages} pages exceed the largest step "
            f"{shapes[-1]}"
        )
    buffer, batch = buffers.take(shape)
    count, row_counts = len(trees), [len(t.rows) for t in trees]
    sizes = np.asarray([len(t.token) for t in trees], np.int32)
    first, first_row = np.cumsum(sizes) - sizes, np.cumsum(row_counts, dtype=np.int32) - row_counts
    if trees:
        batch.first[:count], batch.nodes[:count] = first, sizes
        batch.mode[4] = rows
        batch.committed[:count], batch.after[:count] = [t.committed for t in trees], [t.after for t in trees]
        for row, tree in zip(batch.table, trees, strict=False):
            row[: len(tree.pages)] = tree.pages
        tree_of = np.repeat(np.arange(count, dtype=np.int32), sizes)
        position = batch.committed[tree_of] + np.concatenate([t.depth for t in trees])
        batch.tree[:tokens], batch.position[:tokens] = tree_of, position
        for name in ("token", "subtree", "known"):
            getattr(batch, name)[:tokens] = np.concatenate([getattr(t, name) for t in trees])
        batch.slot[:tokens] = batch.table[tree_of, position // page_size] * page_size + position % page_size
        if opened is not None:
            _place_pages(batch, trees, tokens, opened, page_size)
        batch.logit_node[:rows] = np.repeat(first, row_counts) + np.concatenate([t.rows for t in trees])
    for tree, node, row in zip(trees, first, first_row, strict=True):
        _place_drafts(batch, tree, node, row)
        _place_sampling(batch, tree, slice(row, row + len(tree.rows)))
    _modes(batch, trees)
    used = _place_masks(batch, trees, first_row, masks.take(shape.rows)) if masks and batch.mode[3] else None
    return Packed(
        shape, buffer, first.tolist(), first_row.tolist(), tokens, batch.committed[:count], bool(batch.mode[2]), used
    )  # fmt: skip


def _place_pages(batch: Batch, trees: Sequence[Tree], tokens: int, opened: OpenPages, page_size: int) -> None:
    """Fill in the written pages and the open page of each request."""
    pages, node, place = np.unique(batch.slot[:tokens] // page_size, return_index=True, return_inverse=True)
    batch.written[: len(pages)], batch.place[:tokens] = pages, place
    batch.written_tree[: len(pages)] = batch.tree[node]
    batch.written_base[: len(pages)] = batch.position[node] // page_size * page_size
    writes = []
    for tree in trees:
        end = tree.committed + int(tree.depth.max())
        first = tree.committed // page_size
        touched = tree.pages[first : end // page_size + 1].tolist()
        writes.append((touched, tree.committed % page_size > 0, int(tree.pages[first - 1]) if first else None))
    batch.opened[: len(trees)], batch.reread[: len(trees)] = opened.assign(writes)


def _place_drafts(batch: Batch, tree: Tree, node: int, row: int) -> None:
    """Fill in the logit row of each draft's parent and, for rejection sampling, the drawn children of each row."""
    if tree.known[-1]:  # drafts come last
        return
    parents = tree.parents()
    if len(tree.rows) == len(parents):  # node i has row i
        parent_row = row + parents
    else:
        row_of = np.full(len(parents), -1, np.int32)
        row_of[tree.rows] = np.arange(row, row + len(tree.rows))
        parent_row = row_of[parents]
    parent_row[tree.known == 1] = 0
    if (parent_row < 0).any():
        raise ValueError("the parent of a draft is not a logit row of the tree")
    batch.parent_row[node : node + len(tree.token)] = parent_row
    if tree.drawn is not None:
        for i in np.flatnonzero(tree.known == 0):
            at = parent_row[i]
            batch.children[at, np.count_nonzero(batch.children[at] >= 0)] = tree.token[i]
            batch.drawn_from[at] = tree.drawn[i]


def _place_sampling(batch: Batch, tree: Tree, rows: slice) -> None:
    s = tree.sampling
    if tree.following is not None:
        batch.following[rows] = tree.following
    if s.mode:
        batch.temperature[rows] = s.temperature
        batch.top_p[rows], batch.min_p[rows], batch.top_k[rows] = s.top_p, s.min_p, s.top_k
        batch.seed[rows] = np.asarray(s.seed, np.uint32).view(np.int32)
    if tree.penalty_row is not None:
        batch.presence[rows], batch.frequency[rows], batch.repetition[rows] = s.presence, s.frequency, s.repetition
        batch.penalty_row[rows] = tree.penalty_row


def _place_masks(batch: Batch, trees: Sequence[Tree], first_row: np.ndarray, masks: np.ndarray) -> np.ndarray:
    free = 1
    for tree, row in zip(trees, first_row, strict=True):
        if tree.masks is not None:
            end, count = row + len(tree.rows), len(tree.masks)
            batch.mask_row[end - count : end] = np.arange(free, free + count)
            masks[free : free + count] = tree.masks
            free += count
    return masks


def _modes(batch: Batch, trees: Sequence[Tree]) -> None:
    batch.mode[0] = max((t.sampling.mode for t in trees), default=0)
    batch.mode[1] = any(t.penalty_row is not None for t in trees)
    batch.mode[2] = any(t.sampling.logprobs or t.following is not None for t in trees)
    batch.mode[3] = any(t.masks is not None for t in trees)
