"""Runs the engine's compiled steps directly over random KV, to time the verification of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.compilation import compile_ahead
from jaxspec.models.config import DecoderConfig
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.layers import Layers
from jaxspec.step.packing import Packed, SamplingInputs, Tree, pack
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import StepResult, make_step

#: Number of distinct random pages that the KV is built from: a prime, so that rows of pages differ.
DIFFERENT = 61


@dataclass(frozen=True, slots=True)
class Shared:
    """What the compared ways share: a model on the device, as `jaxspec.step.step.split` returns it."""

    config: DecoderConfig
    parts: tuple[Any, Any, tuple[jax.Array, ...]]
    page_size: int


class Steps:
    """Compiled steps, one for each size in `tokens`, for `requests` requests of up to `pages` pages each.

    They have their own pool of `room` pages (default: `requests * pages`). All tokens of a step are logit rows.
    """

    def __init__(
        self, shared: Shared, layers: Layers, tokens: Iterable[int], requests: int, pages: int, room: int | None = None
    ):
        graph, treedef, self._leaves = shared.parts
        self.room, self._page_size = requests * pages if room is None else room, shared.page_size
        self._shapes = {t: BatchShape(t, t, requests, pages) for t in tokens}
        self._buffers = BatchBuffers(self._shapes.values())
        self.kv_cache = KVCache.zeros(shared.config, self.room, shared.page_size, "float32")
        self._rest = PenaltyTable.empty(1, shared.config.vocab_size), DraftDistributions.empty()
        arguments = self._leaves, self.kv_cache, *self._rest
        self._programs = {
            s: compile_ahead(make_step(graph, treedef, s, layers), *arguments, np.zeros(s.size, np.int32), donate=1)
            for s in self._shapes.values()
        }

    def pack(self, trees: Sequence[Tree], tokens: int) -> Packed:
        """Pack the trees into the step with this number of tokens."""
        return pack(trees, [self._shapes[tokens]], self._buffers, self._page_size)

    def run(self, packed: Packed) -> StepResult:
        self.kv_cache, result = self._programs[packed.shape](self._leaves, self.kv_cache, *self._rest, packed.buffer)
        return result

    def temporaries(self, packed: Packed) -> int:
        """Bytes of temporaries of the step, without weights, KV and results."""
        analysis = self._programs[packed.shape].memory_analysis()
        assert analysis is not None  # None on some devices
        return analysis.temp_size_in_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """One way to verify a batch: the packed batch, the steps that run it, and the KV that it reads."""

    steps: Steps
    packed: Packed
    kv: KVCache

    def rows(self, nodes: np.ndarray) -> np.ndarray:
        """Sampled tokens at the first `nodes [requests]` nodes of each request. Leaves this batch's KV in the steps.

        Call it before other runs: a run commits tokens, which padded rows would read in the next one.
        """
        self.steps.kv_cache = jax.tree.map(jnp.copy, self.kv)  # the step donates its pool
        decision = np.asarray(self.steps.run(self.packed).decision)
        return np.concatenate([decision[c : c + n] for c, n in zip(self.packed.rows, nodes, strict=True)])


def chain(tokens: Sequence[int] | np.ndarray, committed: int, pages: np.ndarray) -> Tree:
    """A tree of a known token and a chain of drafts, with logits of all nodes."""
    depth = np.arange(len(tokens), dtype=np.int32)
    known = (depth == 0).astype(np.int32)
    return Tree(
        np.asarray(tokens, np.int32), depth, len(depth) - depth, known, committed, pages, depth, SamplingInputs()
    )  # fmt: skip


def different_pages(config: DecoderConfig, page_size: int, seed: int) -> KVCache:
    """A KV cache of `DIFFERENT` pages with normally distributed keys and values."""
    zeros = KVCache.zeros(config, DIFFERENT, page_size, "float32")
    keys, values = (jax.random.normal(jax.random.key(seed + i), x.shape) for i, x in enumerate(zeros[:2]))
    return zeros._replace(keys=keys, values=values)


@jax.jit
def filled(source: KVCache, content: jax.typing.ArrayLike, live: jax.typing.ArrayLike) -> KVCache:
    """A pool filled from `source`: page i is `source`'s page `content[i]` modulo `DIFFERENT` (`[pages]` int32).

    Positions that are not `live` (`[pages, page_size]` bool) get what `PaddedLayers` needs for padding: NaN keys and
    zero values.
    """
    content, live = jnp.asarray(content) % DIFFERENT, jnp.asarray(live)
    return source._replace(
        keys=jnp.where(live[:, None, None, :], source.keys[:, content], jnp.nan),
        values=jnp.where(live[:, None, :, None], source.values[:, content], 0.0),
    )
