"""Products of rows with their experts' matrices on GPUs, in Pallas with its Triton back end.

One program computes a tile of rows of one expert times a block of columns. The tiles of an expert begin at its first
row, so the number of tiles is static although counts are not, programs of the tiles that are left over do nothing, and
the matrices of experts without rows are not read. See `jaxspec.kernels.tree_attention` for the choice of Triton.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from jaxspec.kernels.tree_attention import product

#: Columns of a block, and the depth that is multiplied at once.
_COLUMNS, _DEPTH = 64, 64


class Tiles(NamedTuple):
    """expert: of each tile. begin, end: its first row, and the end of the expert's rows; end 0: the tile is unused."""

    expert: Int32[Array, " tiles"]
    begin: Int32[Array, " tiles"]
    end: Int32[Array, " tiles"]


def tile_rows(rows: int) -> int:
    """Rows of a tile in a product with `rows` rows, of all experts together. Tensor cores take 16 at least."""
    return 16 if rows <= 512 else 32 if rows <= 2048 else 64


def plan(counts: Int32[Array, " experts"], rows: int, tile: int) -> Tiles:
    """Tiles of `tile` rows for experts with `counts` rows each, `rows` together."""
    of_expert = (counts + tile - 1) // tile
    upto, ends = jnp.cumsum(of_expert), jnp.cumsum(counts)
    number = jnp.arange(rows // tile + min(rows, counts.shape[0]), dtype=jnp.int32)
    expert = jnp.minimum((number[:, None] >= upto[None, :]).sum(1), counts.shape[0] - 1).astype(jnp.int32)
    begin = (ends - counts)[expert] + (number - (upto - of_expert)[expert]) * tile
    end = jnp.where(number < upto[-1], ends[expert], 0)
    return Tiles(expert, begin.astype(jnp.int32), end.astype(jnp.int32))


def multiply(
    x: Float[Array, "N K"],
    weight: Float[Array, "experts K out"],
    width: int,
    layer: Array | None,
    counts: Int32[Array, " experts"],
    interpret: bool = False,
) -> Float32[Array, "N out"]:
    """The `Grouped` product of `jaxspec.models.layers`: rows stand by expert, `counts` of each, N together.

    Sums are in float32, over the depth in one order, so a row does not depend on the others. `width` and `layer` are
    for other layouts of weights. interpret: run on the CPU, for tests.
    """
    rows, out = x.shape[0], weight.shape[2]
    tile = tile_rows(rows)
    tiles = plan(counts, rows, tile)
    return pl.pallas_call(
        partial(_one_tile, rows=tile), grid=(tiles.expert.shape[0], pl.cdiv(out, _COLUMNS)), interpret=interpret,
        name="expert_products", compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        out_shape=jax.ShapeDtypeStruct((rows, out), jnp.float32),
    )(x, weight, tiles)  # fmt: skip


def _one_tile(x_ref: Any, weight_ref: Any, tiles: Tiles, out_ref: Any, *, rows: int) -> None:
    """A tile's rows times a block of its expert's columns."""
    tile, block = pl.program_id(0), pl.program_id(1)
    begin, end = tiles.begin[tile], tiles.end[tile]

    @pl.when(begin < end)
    def _() -> None:
        expert, depth, width = tiles.expert[tile], x_ref.shape[1], out_ref.shape[1]
        row, column = begin + jnp.arange(rows), block * _COLUMNS + jnp.arange(_COLUMNS)
        mine, inside = row < end, column < width
        # Masked places are not read, but the interpreter wants them within bounds.
        from_row, from_column = jnp.minimum(row, end - 1)[:, None], jnp.minimum(column, width - 1)[None, :]

        def add(i: Array, total: Array) -> Array:
            at = i * _DEPTH + jnp.arange(_DEPTH)
            there, at = at < depth, jnp.minimum(at, depth - 1)
            a = plgpu.load(x_ref.at[from_row, at[None, :]], mask=mine[:, None] & there[None, :], other=0.0)
            b = plgpu.load(
                weight_ref.at[expert, at[:, None], from_column], mask=there[:, None] & inside[None, :], other=0.0
            )
            return total + product(a, b)

        blocks = jnp.int32(pl.cdiv(depth, _DEPTH))  # Triton wants both bounds in one type
        total = lax.fori_loop(jnp.int32(0), blocks, add, jnp.zeros((rows, _COLUMNS), jnp.float32))
        plgpu.store(out_ref.at[row[:, None], column[None, :]], total, mask=mine[:, None] & inside[None, :])
