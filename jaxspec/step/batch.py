"""The batch of one step: every field's shape in one place, carried to the device as a single int32 buffer.

One transfer a step instead of thirty keeps dispatch cheap. Host code writes through numpy views of the buffer, device
code reads static slices of it; float fields are the same bits seen as float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class BatchShape:
    """The static sizes of one compiled step.

    tokens T: nodes of all trees, padded; choices C: nodes whose logits are computed; trees R; pages M: most pages of a
    request; children K: most children of a node that rejection sampling tells apart, 0 without it; written W: most
    pages that are written, where the pool is quantised, else 0.
    """

    tokens: int
    rows: int
    trees: int
    pages: int
    children: int = 0
    written: int = 0

    @cached_property
    def layout(self) -> dict[str, tuple[int, tuple[int, ...], bool]]:
        """Field name -> (offset, shape, is float)."""
        t, c, r, w = (self.tokens,), (self.rows,), (self.trees,), (self.written,)
        shapes: dict[str, tuple[tuple[int, ...], bool]] = dict(
            token=(t, False), position=(t, False), subtree=(t, False), known=(t, False), parent_row=(t, False),
            slot=(t, False), tree=(t, False),
            first=(r, False), nodes=(r, False), committed=(r, False), table=((self.trees, self.pages), False),
            logit_node=(c, False), following=(c, False), mode=((3,), False),
            temperature=(c, True), top_p=(c, True), min_p=(c, True), top_k=(c, False), seed=((self.rows, 2), False),
            presence=(c, True), frequency=(c, True), repetition=(c, True), penalty_row=(c, False),
            written=(w, False), written_tree=(w, False), written_base=(w, False), place=(t if w[0] else w, False),
            opened=(r if w[0] else w, False), reread=(r if w[0] else w, False),
            children=((self.rows, self.children), False), drawn_from=(c if self.children else (0,), False),
        )  # fmt: skip
        out, offset = {}, 0
        for name, (shape, is_float) in shapes.items():
            out[name] = (offset, shape, is_float)
            offset += prod(shape)
        out["end"] = (offset, (), False)
        return out

    @property
    def size(self) -> int:
        return self.layout["end"][0]


class Batch(NamedTuple):
    """The fields, as numpy views on the host or arrays on the device. Shapes: T tokens, C choices, R trees, M pages,
    W written pages.

    Nodes lie in depth-first preorder, tree after tree. Padding nodes come last, with token 0, subtree 1, slot -1 and
    tree R; padding trees have no nodes.
    """

    token: Any  # [T] int32
    position: Any  # [T] absolute position of the node
    subtree: Any  # [T] nodes of its subtree, itself included
    known: Any  # [T] 1: prompt or decided token, accepted by right; 0: draft
    parent_row: Any  # [T] which choice must equal a draft's token: that of its parent
    slot: Any  # [T] page * page_size + offset where the KV goes if accepted, -1 for padding
    tree: Any  # [T] the node's tree
    first: Any  # [R] first node of the tree
    nodes: Any  # [R] its number of nodes
    committed: Any  # [R] positions of its request that are committed
    table: Any  # [R, M] pages of the request, in order
    logit_node: Any  # [C] node whose logits are wanted
    following: Any  # [C] the known token after it, whose log-probability a prompt's logprobs need
    mode: Any  # [3] CHOICE: 0 argmax, 1 sampled, 2 filtered too; PENALTY: 0/1; LOGPROBS: 0/1
    temperature: Any  # [C]
    top_p: Any  # [C]
    min_p: Any  # [C]
    top_k: Any  # [C] 0: no limit
    seed: Any  # [C, 2] the request's key
    presence: Any  # [C]
    frequency: Any  # [C]
    repetition: Any  # [C]
    penalty_row: Any  # [C] row of the penalty table
    written: Any  # [W] pages that the nodes' slots lie in, -1: none (this and the next five are [0] if W is 0)
    written_tree: Any  # [W] whose they are
    written_base: Any  # [W] the position of their first slot
    place: Any  # [T] which of them the node's slot lies in, W: none
    opened: Any  # [R] the open page (`jaxspec.step.kv_int8`) that the request is filling
    reread: Any  # [R] 1: it must be read from the pool first
    children: Any  # [C, K] tokens of the draft nodes below it, in the order in which they were drawn; -1: no more
    drawn_from: Any  # [C] row of `Drawn` that they were drawn from, -1: none ([0] if K is 0)

    @classmethod
    def unpack(cls, buffer: jax.Array, shape: BatchShape) -> Batch:
        """The same on the device: `buffer [shape.size]` int32."""
        out = {}
        for name in cls._fields:
            offset, dims, is_float = shape.layout[name]
            value = buffer[offset : offset + prod(dims)].reshape(dims)
            out[name] = jax.lax.bitcast_convert_type(value, jnp.float32) if is_float else value
        return cls(**out)


class BatchBuffers:
    """Batches for the host to fill, each with every field at its padding value.

    A shape has two or more, taken in turn: while the device reads one, the next step can be written to another.
    """

    def __init__(self, shapes: Iterable[BatchShape], turns: int = 2):
        self._padding = {shape: _padding(shape) for shape in shapes}
        self._turns = {
            shape: cycle([_views(blank.copy(), shape) for _ in range(turns)]) for shape, blank in self._padding.items()
        }

    def take(self, shape: BatchShape) -> tuple[np.ndarray, Batch]:
        """A buffer `[shape.size]` int32 and the views to write through."""
        buffer, batch = next(self._turns[shape])
        buffer[:] = self._padding[shape]
        return buffer, batch


def _padding(shape: BatchShape) -> np.ndarray:
    """The buffer of an empty batch."""
    buffer, batch = _views(np.zeros(shape.size, np.int32), shape)
    batch.subtree[:] = 1
    batch.known[:] = 1
    batch.slot[:] = -1
    batch.tree[:] = shape.trees
    batch.top_p[:] = 1
    batch.repetition[:] = 1
    batch.children[:] = batch.drawn_from[:] = batch.written[:] = -1
    batch.place[:] = shape.written
    return buffer


def _views(buffer: np.ndarray, shape: BatchShape) -> tuple[np.ndarray, Batch]:
    return buffer, Batch(*(_view(buffer, *shape.layout[name]) for name in Batch._fields))


def _view(buffer: np.ndarray, offset: int, dims: tuple[int, ...], is_float: bool) -> np.ndarray:
    part = buffer[offset : offset + prod(dims)].reshape(dims)
    return part.view(np.float32) if is_float else part
