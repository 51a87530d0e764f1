"""The inputs of one step: all fields with their shapes, packed into a single int32 buffer.

One host-to-device transfer per step instead of thirty keeps dispatch cheap. Host code writes through numpy views of the
buffer; device code reads static slices of it. Float fields are float32 values bit-cast to int32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

if TYPE_CHECKING:
    AnyArray = Any  # host code assigns to slices, device code uses `.at`: no static type has both
else:
    #: A numpy view on the host, a JAX array on the device.
    AnyArray = np.ndarray | jax.Array


@dataclass(frozen=True)
class BatchShape:
    """The static sizes of one compiled step.

    tokens T: nodes of all trees, padded; rows C: logit rows; trees R; pages M: maximum pages per request; children K:
    maximum children per node for rejection sampling, 0 without it; written W: maximum pages that one step writes if the
    KV cache is quantised, else 0.
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
            first=(r, False), nodes=(r, False), committed=(r, False), after=(r, False),
            table=((self.trees, self.pages), False),
            logit_node=(c, False), following=(c, False), mode=((5,), False), mask_row=(c, False),
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
        """Elements of the buffer."""
        return self.layout["end"][0]

    @property
    def capacity(self) -> tuple[int, int, int, int]:
        """Most tokens, logit rows, trees, and pages of a tree that fit."""
        return self.tokens, self.rows, self.trees, self.pages


class Batch(NamedTuple):
    """The fields, as numpy views on the host or JAX arrays on the device.

    Dimensions: T nodes, C logit rows, R trees, M pages per request, W written pages, K children (see `BatchShape`).
    `T_or_0` and `R_or_0` are 0 if W is 0, `C_or_0` is 0 if K is 0.

    Nodes are in depth-first preorder, one tree after another. Padding nodes come last, with token 0, subtree 1, slot -1
    and tree R. Padding trees have no nodes.
    """

    token: Int32[AnyArray, " T"]  # negative: see `jaxspec.step.ahead`
    position: Int32[AnyArray, " T"]  # absolute position in the request
    subtree: Int32[AnyArray, " T"]  # nodes in the node's subtree, itself included
    known: Int32[AnyArray, " T"]  # 1: prompt or already sampled token, always accepted; 0: draft
    parent_row: Int32[AnyArray, " T"]  # logit row of a draft's parent: the token sampled there must equal the draft
    slot: Int32[AnyArray, " T"]  # where the KV goes if accepted: page * page_size + offset; -1 for padding
    tree: Int32[AnyArray, " T"]  # index of the node's tree
    first: Int32[AnyArray, " R"]  # first node of the tree
    nodes: Int32[AnyArray, " R"]  # number of nodes of the tree
    committed: Int32[AnyArray, " R"]  # committed positions of the request
    after: Int32[AnyArray, " R"]  # the request's tree in the step before, whose results the host lacks; -1: none
    table: Int32[AnyArray, "R M"]  # pages of the request, in order
    logit_node: Int32[AnyArray, " C"]  # node of each logit row
    following: Int32[AnyArray, " C"]  # known token after it, for prompt log-probabilities
    # SAMPLING: 0 argmax, 1 sampled, 2 sampled with filters; PENALTY, LOGPROBS, MASK: 0/1; ROWS: logit rows in use
    mode: Int32[AnyArray, " 5"]
    mask_row: Int32[AnyArray, " C"]  # row of the step's masks, 0: all tokens are allowed
    temperature: Float32[AnyArray, " C"]
    top_p: Float32[AnyArray, " C"]
    min_p: Float32[AnyArray, " C"]
    top_k: Int32[AnyArray, " C"]  # 0: no limit
    seed: Int32[AnyArray, "C 2"]  # the request's random key
    presence: Float32[AnyArray, " C"]
    frequency: Float32[AnyArray, " C"]
    repetition: Float32[AnyArray, " C"]
    penalty_row: Int32[AnyArray, " C"]  # row of `PenaltyTable`
    # For quantised KV caches (`jaxspec.step.kv_int8`):
    written: Int32[AnyArray, " W"]  # pages that contain the nodes' slots, -1: none
    written_tree: Int32[AnyArray, " W"]  # tree that the page belongs to
    written_base: Int32[AnyArray, " W"]  # position of the page's first slot
    place: Int32[AnyArray, " T_or_0"]  # index into `written` of the page with the node's slot, W: none
    opened: Int32[AnyArray, " R_or_0"]  # open page that the request is filling
    reread: Int32[AnyArray, " R_or_0"]  # 1: load the open page from the pool first
    # For rejection sampling:
    children: Int32[AnyArray, "C K"]  # tokens of the node's draft children, in the order they were drawn; -1: none
    drawn_from: Int32[AnyArray, " C_or_0"]  # row of `DraftDistributions` that they were drawn from, -1: none

    @classmethod
    def unpack(cls, buffer: Int32[jax.Array, " size"], shape: BatchShape) -> Batch:
        """Split a buffer of `shape.size` elements into fields on the device. Traced."""
        out = {}
        for name in cls._fields:
            offset, dims, is_float = shape.layout[name]
            value = buffer[offset : offset + prod(dims)].reshape(dims)
            out[name] = jax.lax.bitcast_convert_type(value, jnp.float32) if is_float else value
        return cls(**out)

    def with_rows(self, count: int) -> Batch:
        """The batch with its first `count` logit rows only."""
        return self._replace(**{name: getattr(self, name)[:count] for name in _OF_ROWS})


_OF_ROWS = (
    "logit_node", "following", "mask_row", "temperature", "top_p", "min_p", "top_k", "seed", "presence", "frequency",
    "repetition", "penalty_row", "children", "drawn_from",
)  # fmt: skip


class BatchBuffers:
    """Reused host buffers, filled with padding values each time they are taken.

    Each shape has `copies` buffers, used in rotation: the next step is written to one while the device reads another.
    """

    def __init__(self, shapes: Iterable[BatchShape], copies: int = 2):
        self._padding = {shape: _padding(shape) for shape in shapes}
        self._rotation = {
            shape: cycle([_views(blank.copy(), shape) for _ in range(copies)]) for shape, blank in self._padding.items()
        }

    def take(self, shape: BatchShape) -> tuple[np.ndarray, Batch]:
        """Return a padded buffer `[shape.size]` int32 and the views to write through."""
        buffer, batch = next(self._rotation[shape])
        buffer[:] = self._padding[shape]
        return buffer, batch


def _padding(shape: BatchShape) -> np.ndarray:
    """The buffer of an empty batch: all padding."""
    buffer, batch = _views(np.zeros(shape.size, np.int32), shape)
    batch.subtree[:] = 1
    batch.known[:] = 1
    batch.mode[4] = shape.rows  # so that the time of an empty step is that of a full one
    batch.slot[:] = batch.after[:] = -1
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
