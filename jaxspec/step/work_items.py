"""Work items of tree attention on GPUs: how a step's attention is divided among the GPU's multiprocessors.

The G query heads that share a key-value head form a group. The *rows* of a tree are its nodes times G, node by node. A
*tile* is up to `rows` rows of one tree; an *item* is a tile and a range of the request's pages. The last item of a tile
also takes the step's own nodes. So items are of similar size, whatever the lengths of the requests, and no request is
padded to the length of another (FlashDecoding; SPIN §V-A).

How a request is divided depends on its own length and tree alone. So its attention is summed in the same order,
whatever other requests are in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxspec.step.batch import Batch

#: Positions per item, up to `SPLITS` items per tile. Then items get longer, so that the number of items is bounded.
#: 256 positions of one request of 2,048 are 8 items for each key-value head.
POSITIONS = 256
#: Most items of a tree's first tile; a tree of several tiles has fewer per tile.
SPLITS = 16


class WorkItems(NamedTuple):
    """W items and N tiles of one step, in the order of their trees. Padding items have tree -1, padding tiles no items.

    It is the same for all layers and key-value heads.
    """

    tree: Int32[Array, " W"]
    row: Int32[Array, " W"]  # first row of its tile, counted within the tree
    begin: Int32[Array, " W"]  # first page, an index into the request's pages
    end: Int32[Array, " W"]  # one past its last page
    own: Int32[Array, " W"]  # 1: the tree's own nodes too
    place: Int32[Array, " W"]  # where its rows begin among the `most_rows` rows of all items
    first_item: Int32[Array, " N"]  # first item of the tile
    items: Int32[Array, " N"]  # number of its items
    first_row: Int32[Array, " N"]  # first row of the tile, counted over all trees
    rows: Int32[Array, " N"]  # number of its rows


def most_items(tokens: int, trees: int, group: int, rows: int, pages: int, page_size: int) -> int:
    """Upper bound of the items of a step, W. `pages`: of the page table.

    A tree has at most one tile that is not full, and at most `SPLITS` items if it has fewer tiles than that.
    """
    full = tokens * group // rows
    return min(SPLITS * trees + full, most_splits(pages, page_size) * (trees + full))


def most_splits(pages: int, page_size: int) -> int:
    """Upper bound of the items of a tile. Items that no tile needs are programs that end at once, but they take time to
    start: small page tables have fewer."""
    return min(SPLITS, max(1, -(-pages * page_size // POSITIONS)))


def most_rows(tokens: int, group: int, pages: int, page_size: int) -> int:
    """Upper bound of the rows of all items together."""
    return most_splits(pages, page_size) * tokens * group


def plan(batch: Batch, group: int, rows: int, page_size: int) -> WorkItems:
    """The work items of a step. Traced; `group` G, `rows` and `page_size` are static.

    It runs on the device, once a step: nothing has to be sent, and the host does not wait.
    """
    trees, tokens = batch.first.shape[0], batch.token.shape[0]
    tiles = -(-batch.nodes * group // rows)
    wanted = -(-batch.committed // POSITIONS)
    splits = jnp.clip(wanted, 1, jnp.maximum(1, SPLITS // jnp.maximum(tiles, 1)))
    pages = -(-batch.committed // page_size)
    tile_end, item_end = jnp.cumsum(tiles), jnp.cumsum(tiles * splits)

    tile = jnp.arange(trees + tokens * group // rows, dtype=jnp.int32)
    tree, index = _locate(tile, tile_end, tiles)
    real = tile < tile_end[-1]
    item = jnp.arange(most_items(tokens, trees, group, rows, batch.table.shape[1], page_size), dtype=jnp.int32)
    of, index_of = _locate(item, item_end, tiles * splits)
    split, row = index_of % splits[of], index_of // splits[of] * rows
    # Rows of the trees before it, of the tree's full tiles before it, and of the splits of its own tile before it.
    tree_rows = batch.nodes * group
    before = (jnp.cumsum(tree_rows * splits) - tree_rows * splits)[of]
    own_rows = jnp.minimum(rows, tree_rows[of] - row)
    return WorkItems(
        tree=jnp.where(item < item_end[-1], of, -1),
        row=row,
        begin=split * pages[of] // splits[of],
        end=(split + 1) * pages[of] // splits[of],
        own=(split == splits[of] - 1).astype(jnp.int32),
        place=before + row * splits[of] + split * own_rows,
        first_item=(item_end - tiles * splits)[tree] + index * splits[tree],
        items=jnp.where(real, splits[tree], 0),
        first_row=batch.first[tree] * group + index * rows,
        rows=jnp.where(real, jnp.minimum(rows, batch.nodes[tree] * group - index * rows), 0),
    )


def _locate(
    index: Int32[Array, " X"], end: Int32[Array, " R"], count: Int32[Array, " R"]
) -> tuple[Int32[Array, " X"], Int32[Array, " X"]]:
    """The tree that the X-th tile or item belongs to, and its place within the tree; the last tree for padding."""
    # Counting is one fusion; the default, a binary search, is a loop that the host has to steer.
    tree = jnp.sum(end[None, :] <= index[:, None], 1, dtype=jnp.int32)
    tree = jnp.minimum(tree, end.shape[0] - 1)
    return tree, index - (end - count)[tree]
