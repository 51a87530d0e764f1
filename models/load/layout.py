"""Where a checkpoint has the parts of a model: names of tensors, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jaxspec.models.config import DecoderConfig


class Rows(NamedTuple):
    """Rows of a tensor that are a part's, and how many rows the tensor has."""

    places: slice | np.ndarray
    total: int


#: Rows of the tensor that are a part's, by the configuration.
RowsOf = Callable[[DecoderConfig], Rows]


@dataclass(frozen=True)
class Layout:
    """Part -> where it is. Matrices are `[out, in]`.

    names: of tensors; the first `{}` is the layer, the second the expert.
    rows: of parts that are some rows of a tensor, or have them in another order.
    transposed: parts that are stored `[in, out]`.
    plus_one: parts that are stored minus one.
    flat: matrices of one row that are stored as vectors.
    prefix: with which some checkpoints begin all names and others none.
    ignored: ends of the names of tensors that are no weights.
    """

    names: Mapping[str, str]
    rows: Mapping[str, RowsOf] = field(default_factory=dict[str, RowsOf])
    transposed: frozenset[str] = frozenset()
    plus_one: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def name(self, part: str, layer: int = 0, expert: int = 0) -> str:
        return self.names[part].format(layer, expert)

    def rows_of(self, part: str, config: DecoderConfig) -> Rows | None:
        """The rows of a part; None: all, as they are."""
        found = self.rows.get(part)
        return None if found is None else found(config)

    def without_prefix(self) -> Layout:
        return replace(self, names={part: name.removeprefix(self.prefix) for part, name in self.names.items()})


def span(first: Callable[[DecoderConfig], int], count: Callable[[DecoderConfig], int],
         total: Callable[[DecoderConfig], int]) -> RowsOf:  # fmt: skip
    """Consecutive rows `first … first + count` of a tensor that has `total` rows."""
    return lambda c: Rows(slice(first(c), first(c) + count(c)), total(c))


def in_turn(*sizes: Callable[[DecoderConfig], int]) -> list[RowsOf]:
    """Parts one after the other in a tensor, with these numbers of rows."""

    def rows(i: int) -> RowsOf:
        return span(lambda c: sum(s(c) for s in sizes[:i]), sizes[i], lambda c: sum(s(c) for s in sizes))

    return [rows(i) for i in range(len(sizes))]


def by_head(which: int) -> RowsOf:
    """Query (0), key (1) or value (2) of a tensor `[heads, 3, head_dim, in]`."""

    def rows(c: DecoderConfig) -> Rows:
        places = np.arange(3 * c.q_size).reshape(c.num_heads, 3, c.head_dim)
        return Rows(places[:, which].reshape(-1), 3 * c.q_size)

    return rows


def halves(heads: Callable[[DecoderConfig], int]) -> RowsOf:
    """Rows of `heads` heads in llama.cpp's order, where rotary pairs are adjacent, as split halves."""

    def rows(c: DecoderConfig) -> Rows:
        places = np.arange(heads(c) * c.head_dim).reshape(heads(c), c.head_dim // 2, 2)
        return Rows(places.swapaxes(1, 2).reshape(-1), heads(c) * c.head_dim)

    return rows


#: Rows of q, k and v, and of gate and up, where they are fused in one tensor.
QKV = in_turn(lambda c: c.q_size, lambda c: c.kv_size, lambda c: c.kv_size)
GATE_UP = in_turn(lambda c: c.intermediate_size, lambda c: c.intermediate_size)
