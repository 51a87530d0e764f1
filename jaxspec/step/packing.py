"""Packing on the host: many trees into one batch, their committed KV into rows read in place and work items.

Request decomposition after SPIN §V-A, with the page as the unit. What is searched here is how each segment of the pool
is read: in place (all its rows, used or not, at the speed of memory) or item by item (only what is used, at several
times the cost a row). The cheaper way is taken for each segment, so padding is bounded by that ratio; it is counted
either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.step.batch import ITEM_TILE, Batch, BatchShape

#: Cost of a work item in rows read in place, on CPU: about 10 µs against 2.3 µs at page size 32.
ITEM_COST = 4


@dataclass(frozen=True, slots=True)
class Choosing:
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
        if self.temperature < 1e-5:
            return 0
        return 2 if self.top_p < 1 or self.min_p > 0 or self.top_k > 0 else 1


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's nodes in preorder, over `committed` positions of KV held in `pages` (int32 array).

    token, depth, subtree, known `[n]`; `depth` counts from the first node, so a node's position is committed + depth.
    `choices` are the nodes whose logits are needed; the parent of every draft must be among them.
    """

    token: np.ndarray
    depth: np.ndarray
    subtree: np.ndarray
    known: np.ndarray
    committed: int
    pages: np.ndarray
    choices: np.ndarray
    choosing: Choosing = field(default_factory=Choosing)
    #: Known token after each choice, for prompt log-probabilities.
    following: np.ndarray | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        committed: int,
        pages: np.ndarray,
        choosing: Choosing,
        choices: int = 1,
        following: np.ndarray | None = None,
    ) -> Tree:
        """Known tokens in a row: a prefill chunk, or the single root of plain decoding. The last `choices` choose."""
        n = len(tokens)
        ahead = np.arange(n, dtype=np.int32)
        token, known = np.asarray(tokens, np.int32), np.ones(n, np.int32)
        return cls(token, ahead, n - ahead, known, committed, pages, ahead[n - choices :], choosing, following)

    def parents(self) -> np.ndarray:
        """Index of each node's parent `[n]`, -1 for the root."""
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
    """A packed step. `nodes[i]` and `choices[i]` are where tree i's nodes and choices begin in the decision vector."""

    shape: BatchShape
    buffer: np.ndarray
    nodes: list[int]
    choices: list[int]
    real_tokens: int
    #: KV positions read, and those of them that some query needed.
    read_positions: int
    used_positions: int
    #: Whether any tree asked for log-probabilities.
    logprobs: bool


def pack(trees: Sequence[Tree], shapes: Sequence[BatchShape], page_size: int) -> Packed:
    """Pack into the smallest of `shapes` (ascending) that holds the trees; ValueError if none does."""
    tokens = sum(len(t.token) for t in trees)
    choices = sum(len(t.choices) for t in trees)
    shape = next(
        (s for s in shapes if s.tokens >= tokens and s.choices >= choices and s.tiles >= _small(trees, s)), None
    )
    if shape is None:
        raise ValueError(f"{tokens} tokens and {choices} choices exceed the largest step {shapes[-1]}")
    buffer, batch = Batch.empty(shape)
    # Requests that share pages lie side by side, so that one work item serves a run of them.
    order = sorted(range(len(trees)), key=lambda i: trees[i].pages.tobytes())
    nodes, firsts = [0] * len(trees), [0] * len(trees)
    node = choice = tile = 0
    small: list[tuple[int, Tree, int]] = []  # (first node, tree, tile)
    large: list[tuple[int, Tree]] = []
    for i in order:
        tree = trees[i]
        nodes[i], firsts[i] = node, choice
        _place(batch, tree, node, choice, page_size)
        count = len(tree.token)
        if tree.committed:
            if count <= shape.tile:
                batch.tile_token[tile, :count] = np.arange(node, node + count)
                batch.token_tile[node : node + count] = tile * shape.tile + np.arange(count)
                small.append((node, tree, tile))
                tile += 1
            else:
                large.append((node, tree))
        node, choice = node + count, choice + len(tree.choices)
    _modes(batch, trees)
    read, used = _committed(batch, shape, small, large, page_size)
    return Packed(shape, buffer, nodes, firsts, tokens, read, used, bool(batch.mode[2]))


def _small(trees: Sequence[Tree], shape: BatchShape) -> int:
    return sum(len(t.token) <= shape.tile and t.committed > 0 for t in trees)


def _place(batch: Batch, tree: Tree, node: int, choice: int, page_size: int) -> None:
    """Write a tree's nodes from `node` on and its choices from `choice` on."""
    span, picks = slice(node, node + len(tree.token)), slice(choice, choice + len(tree.choices))
    position = tree.committed + tree.depth
    batch.token[span] = tree.token
    batch.position[span] = position
    batch.subtree[span] = tree.subtree
    batch.known[span] = tree.known
    batch.slot[span] = tree.pages[position // page_size] * page_size + position % page_size
    batch.choice_node[picks] = node + tree.choices
    if tree.following is not None:
        batch.following[picks] = tree.following
    if not tree.known.all():
        place = np.full(len(tree.token), -1, np.int32)
        place[tree.choices] = np.arange(choice, choice + len(tree.choices))
        parents = tree.parents()
        batch.parent_choice[span] = np.where(tree.known == 1, 0, place[parents])
    c = tree.choosing
    if c.mode:
        batch.temperature[picks] = c.temperature
        batch.top_p[picks], batch.min_p[picks], batch.top_k[picks] = c.top_p, c.min_p, c.top_k
        batch.seed[picks] = np.asarray(c.seed, np.uint32).view(np.int32)
    if c.penalty_row is not None:
        batch.presence[picks], batch.frequency[picks], batch.repetition[picks] = c.presence, c.frequency, c.repetition
        batch.penalty_row[picks] = c.penalty_row


def _modes(batch: Batch, trees: Sequence[Tree]) -> None:
    batch.mode[0] = max((t.choosing.mode for t in trees), default=0)
    batch.mode[1] = any(t.choosing.penalty_row is not None for t in trees)
    batch.mode[2] = any(t.choosing.logprobs for t in trees)


def _committed(
    batch: Batch, shape: BatchShape, small: list[tuple[int, Tree, int]], large: list[tuple[int, Tree]], page_size: int
) -> tuple[int, int]:
    """Fill the row and item fields; -> (positions read, positions used)."""
    items: list[np.ndarray] = []  # each [6, k]: row, valid, start, low, high, tile of the token axis
    read = used = 0
    starts = np.cumsum([0, *shape.segments])
    if small:
        row, valid, start = _rows([t for _, t, _ in small], page_size)
        counts = [-(-t.committed // page_size) for _, t, _ in small]
        first = np.repeat(np.asarray([n for n, _, _ in small], np.int32), counts)
        size = np.repeat(np.asarray([len(t.token) for _, t, _ in small], np.int32), counts)
        reader = np.repeat(np.asarray([tile for _, _, tile in small], np.int32), counts)
        alone = np.bincount(row, minlength=shape.rows)[row] == 1
        segment = np.searchsorted(starts, row, side="right") - 1
        in_use = np.bincount(segment[alone], minlength=len(shape.segments))
        whole = in_use * ITEM_COST >= np.asarray(shape.segments)
        batch.segment_in_place[:] = whole & (in_use > 0)
        direct = alone & whole[segment]
        batch.row_reader[row[direct]] = reader[direct]
        batch.row_valid[row[direct]] = valid[direct]
        batch.row_start[row[direct]] = start[direct]
        read += int(np.asarray(shape.segments)[batch.segment_in_place == 1].sum()) * page_size
        used += int(valid[direct].sum())
        rest = ~direct
        if rest.any():
            items += _cut(row[rest], valid[rest], start[rest], first[rest], first[rest] + size[rest])
    for first_node, tree in large:
        row, valid, start = _rows([tree], page_size)
        low, high = np.full(len(row), first_node), np.full(len(row), first_node + len(tree.token))
        items += _cut(row, valid, start, low, high)
    if not items:
        return read, used
    merged = _join(np.concatenate(items, axis=1))
    count = merged.shape[1]
    segment = np.searchsorted(starts, merged[0], side="right") - 1
    batch.item_count[0] = count
    batch.item_segment[:count], batch.item_row[:count] = segment, merged[0] - starts[segment]
    batch.item_valid[:count], batch.item_start[:count] = merged[1], merged[2]
    batch.item_low[:count], batch.item_high[:count] = merged[3], merged[4]
    return read + count * page_size, used + int(merged[1].sum())


def _rows(trees: Sequence[Tree], page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pool row, valid positions and first position of every committed page of the trees."""
    counts = [-(-t.committed // page_size) for t in trees]
    row = np.concatenate([t.pages[:n] for t, n in zip(trees, counts, strict=True)])
    start = np.concatenate([np.arange(n, dtype=np.int32) for n in counts]) * page_size
    committed = np.repeat(np.asarray([t.committed for t in trees], np.int32), counts)
    return row, np.minimum(committed - start, page_size), start


def _cut(row: np.ndarray, valid: np.ndarray, start: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """Items cut at the tiles of the token axis."""
    out = []
    for tile in range(int(low.min()) // ITEM_TILE, (int(high.max()) - 1) // ITEM_TILE + 1):
        a, b = np.maximum(low, tile * ITEM_TILE), np.minimum(high, (tile + 1) * ITEM_TILE)
        some = a < b
        out.append(np.stack([x[some] for x in (row, valid, start, a, b, np.full_like(row, tile))]))
    return out


def _join(items: np.ndarray) -> np.ndarray:
    """Sort items by row and join those that read the same row from adjoining nodes of one tile."""
    items = items[:, np.lexsort((items[3], items[0]))]
    row, valid, _, low, high, tile = items
    new = np.ones(items.shape[1], bool)
    new[1:] = (row[1:] != row[:-1]) | (low[1:] != high[:-1]) | (tile[1:] != tile[:-1]) | (valid[1:] != valid[:-1])
    heads = np.flatnonzero(new)
    joined = items[:, heads]
    joined[4] = high[np.append(heads[1:], items.shape[1]) - 1]
    return joined
