"""Packing on the host: many trees into one batch, each with the pages that its nodes read.

Request decomposition (SPIN §V-A) happens where the pages are read: `kernels/attention.c` cuts a step into pieces of one
request and one key head, whose length is the request's own. The batch only says which pages belong to which tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.sampling_params import GREEDY_BELOW
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.kv_int8 import OpenPages

_ZERO, _ONE = np.zeros(1, np.int32), np.ones(1, np.int32)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How a request's tokens are chosen: the numbers of `SamplingParams` as the device wants them."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: tuple[int, int] = (0, 0)
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    penalty_row: int | None = None
    logprobs: bool = False

    @property
    def mode(self) -> int:
        if self.temperature < GREEDY_BELOW:
            return 0
        return 2 if self.top_p < 1 or self.min_p > 0 or self.top_k > 0 else 1


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's nodes in preorder, over `committed` positions of KV held in `pages` (int32 array).

    token, depth, subtree, known `[n]`; `depth` counts from the first node, so a node's position is committed + depth.
    Known nodes form a chain and come first. `rows` are the nodes whose logits are needed; the parent of every draft
    must be among them.
    """

    token: np.ndarray
    depth: np.ndarray
    subtree: np.ndarray
    known: np.ndarray
    committed: int
    pages: np.ndarray
    rows: np.ndarray
    sampling: SamplingInputs = field(default_factory=SamplingInputs)
    #: Known token after each choice, for prompt log-probabilities.
    following: np.ndarray | None = None
    #: Index of each node's parent `[n]`, -1 for the root, where it is known already.
    parent: np.ndarray | None = None
    #: Row of `step.rejection.Drawn` that each draft was drawn from `[n]` int32, siblings in the order of their drawing;
    #: None: its choice is compared with it.
    drawn: np.ndarray | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        committed: int,
        pages: np.ndarray,
        sampling: SamplingInputs,
        rows: int = 1,
        following: np.ndarray | None = None,
    ) -> Tree:
        """Known tokens in a row: a prefill chunk, or the single root of plain decoding. The last `rows` choose."""
        n = len(tokens)
        token = np.asarray(tokens, np.int32)
        if n == 1:  # the common case, every microsecond of which the device waits
            return cls(token, _ZERO, _ONE, _ONE, committed, pages, _ZERO[1 - rows :], sampling, following)
        ahead = np.arange(n, dtype=np.int32)
        known = np.ones(n, np.int32)
        return cls(token, ahead, n - ahead, known, committed, pages, ahead[n - rows :], sampling, following)

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
    """A packed step. `nodes[i]` and `rows[i]` are where tree i's nodes and choices begin in the decision vector."""

    shape: BatchShape
    buffer: np.ndarray
    nodes: list[int]
    rows: list[int]
    real_tokens: int
    #: Committed positions of each tree `[trees]`.
    committed: np.ndarray
    #: Whether any tree asked for log-probabilities.
    logprobs: bool


def pack(
    trees: Sequence[Tree],
    shapes: Sequence[BatchShape],
    buffers: BatchBuffers,
    page_size: int,
    opened: OpenPages | None = None,
) -> Packed:
    """Pack into the smallest of `shapes` (ascending) that holds the trees; ValueError if none does.

    `opened`: of a quantised pool, whose shapes say how many pages may be written.
    """
    tokens = sum(len(t.token) for t in trees)
    rows = sum(len(t.rows) for t in trees)
    shape = next((s for s in shapes if s.tokens >= tokens and s.rows >= rows and s.trees >= len(trees)), None)
    if shape is None:
        raise ValueError(
            f"{len(trees)} trees of {tokens} tokens and {rows} choices exceed the largest step {shapes[-1]}"
        )
    buffer, batch = buffers.take(shape)
    count, picks = len(trees), [len(t.rows) for t in trees]
    sizes = np.asarray([len(t.token) for t in trees], np.int32)
    first, firsts = np.cumsum(sizes) - sizes, np.cumsum(picks, dtype=np.int32) - picks
    if trees:
        batch.first[:count], batch.nodes[:count] = first, sizes
        batch.committed[:count] = [t.committed for t in trees]
        for row, tree in zip(batch.table, trees, strict=False):
            row[: len(tree.pages)] = tree.pages
        of = np.repeat(np.arange(count, dtype=np.int32), sizes)
        position = batch.committed[of] + np.concatenate([t.depth for t in trees])
        batch.tree[:tokens], batch.position[:tokens] = of, position
        for name in ("token", "subtree", "known"):
            getattr(batch, name)[:tokens] = np.concatenate([getattr(t, name) for t in trees])
        batch.slot[:tokens] = batch.table[of, position // page_size] * page_size + position % page_size
        if opened is not None:
            _place_pages(batch, trees, tokens, opened, page_size)
        batch.logit_node[:rows] = np.repeat(first, picks) + np.concatenate([t.rows for t in trees])
    for tree, node, row in zip(trees, first, firsts, strict=True):
        _place_drafts(batch, tree, node, row)
        _place_sampling(batch, tree, slice(row, row + len(tree.rows)))
    _modes(batch, trees)
    return Packed(
        shape, buffer, first.tolist(), firsts.tolist(), tokens, batch.committed[:count], bool(batch.mode[2])
    )  # fmt: skip


def _place_pages(batch: Batch, trees: Sequence[Tree], tokens: int, opened: OpenPages, page_size: int) -> None:
    """Tell which pages are written, and where those that are being filled are kept."""
    pages, node, place = np.unique(batch.slot[:tokens] // page_size, return_index=True, return_inverse=True)
    batch.written[: len(pages)], batch.place[:tokens] = pages, place
    batch.written_tree[: len(pages)] = batch.tree[node]
    batch.written_base[: len(pages)] = batch.position[node] // page_size * page_size
    wanted = []
    for tree in trees:
        end = tree.committed + int(tree.depth.max())
        touched = tree.pages[tree.committed // page_size : end // page_size + 1]
        wanted.append((touched.tolist(), tree.committed % page_size > 0))
    batch.opened[: len(trees)], batch.reread[: len(trees)] = opened.assign(wanted)


def _place_drafts(batch: Batch, tree: Tree, node: int, row: int) -> None:
    """Tell each draft which choice it must equal."""
    if tree.known[-1]:  # drafts come last
        return
    place = np.full(len(tree.token), -1, np.int32)
    place[tree.rows] = np.arange(row, row + len(tree.rows))
    asked = np.where(tree.known == 1, 0, place[tree.parents()])
    if (asked < 0).any():
        raise ValueError("the parent of a draft is not among the tree's choices")
    batch.parent_row[node : node + len(tree.token)] = asked
    if tree.drawn is not None:
        for i in np.flatnonzero(tree.known == 0):
            at = asked[i]
            batch.children[at, np.count_nonzero(batch.children[at] >= 0)] = tree.token[i]
            batch.drawn_from[at] = tree.drawn[i]


def _place_sampling(batch: Batch, tree: Tree, picks: slice) -> None:
    c = tree.sampling
    if tree.following is not None:
        batch.following[picks] = tree.following
    if c.mode:
        batch.temperature[picks] = c.temperature
        batch.top_p[picks], batch.min_p[picks], batch.top_k[picks] = c.top_p, c.min_p, c.top_k
        batch.seed[picks] = np.asarray(c.seed, np.uint32).view(np.int32)
    if c.penalty_row is not None:
        batch.presence[picks], batch.frequency[picks], batch.repetition[picks] = c.presence, c.frequency, c.repetition
        batch.penalty_row[picks] = c.penalty_row


def _modes(batch: Batch, trees: Sequence[Tree]) -> None:
    batch.mode[0] = max((t.sampling.mode for t in trees), default=0)
    batch.mode[1] = any(t.sampling.penalty_row is not None for t in trees)
    batch.mode[2] = any(t.sampling.logprobs for t in trees)
