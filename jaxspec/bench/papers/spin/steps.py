"""Steps of the engine run by hand, over KV that is made up: what verifying a batch takes, with one kind of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import DecoderConfig
from jaxspec.step.batch import BatchBuffers, BatchShape
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.layers import Layers
from jaxspec.step.packing import Packed, SamplingInputs, Tree, pack
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import Drawn
from jaxspec.step.step import StepResult, make_step

#: Different pages that made-up KV consists of: a prime, so that rows of pages differ.
DIFFERENT = 61


@dataclass(frozen=True, slots=True)
class Shared:
    """What all that is compared has in common: a model on the device, as `jaxspec.step.step.split` gives it."""

    config: DecoderConfig
    parts: tuple[Any, Any, tuple[jax.Array, ...]]
    page_size: int


class Steps:
    """Steps of `requests` requests with up to `pages` pages, over a pool of their own with `room` pages (by default as
    many as all of them can have).

    One of each number of tokens in `tokens`; all of a step's tokens may choose.
    """

    def __init__(
        self, shared: Shared, layers: Layers, tokens: Iterable[int], requests: int, pages: int, room: int | None = None
    ):
        graph, treedef, self._leaves = shared.parts
        self.room, self._page_size = requests * pages if room is None else room, shared.page_size
        self._shapes = {t: BatchShape(t, t, requests, pages) for t in tokens}
        self._buffers = BatchBuffers(self._shapes.values())
        self.pool = KVCache.zeros(shared.config, self.room, shared.page_size, "float32")
        self._rest = PenaltyTable.empty(1, shared.config.vocab_size), Drawn.none()
        self._programs = {
            shape: jax.jit(make_step(graph, treedef, shape, layers), donate_argnums=1)
            .lower(self._leaves, self.pool, *self._rest, jax.ShapeDtypeStruct((shape.size,), jnp.int32))
            .compile()
            for shape in self._shapes.values()
        }

    def pack(self, trees: Sequence[Tree], tokens: int) -> Packed:
        """Into the step of so many tokens."""
        return pack(trees, [self._shapes[tokens]], self._buffers, self._page_size)

    def run(self, packed: Packed) -> StepResult:
        self.pool, result = self._programs[packed.shape](self._leaves, self.pool, *self._rest, packed.buffer)
        return result

    def temporaries(self, packed: Packed) -> int:
        """Bytes that the step needs for itself, beside weights, KV and what it returns."""
        found = self._programs[packed.shape].memory_analysis()
        assert found is not None  # as on some devices
        return found.temp_size_in_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """A packed batch, the steps that it is for, and the KV that it reads."""

    steps: Steps
    packed: Packed
    kv: KVCache

    def rows(self, nodes: np.ndarray) -> np.ndarray:
        """What the first `nodes [requests]` of each request choose. It leaves the steps with KV of this batch.

        Of the first run only: it commits tokens, which padded rows would read in the next one.
        """
        self.steps.pool = jax.tree.map(jnp.copy, self.kv)  # a step's pool is donated
        decision = np.asarray(self.steps.run(self.packed).decision)
        return np.concatenate([decision[c : c + n] for c, n in zip(self.packed.rows, nodes, strict=True)])


def chain(tokens: Sequence[int] | np.ndarray, committed: int, pages: np.ndarray) -> Tree:
    """A known token, and drafts that follow one another; all of them choose."""
    ahead = np.arange(len(tokens), dtype=np.int32)
    known = (ahead == 0).astype(np.int32)
    return Tree(
        np.asarray(tokens, np.int32), ahead, len(ahead) - ahead, known, committed, pages, ahead, SamplingInputs()
    )  # fmt: skip


def different_pages(config: DecoderConfig, page_size: int, seed: int) -> KVCache:
    """Random numbers."""
    blank = KVCache.zeros(config, DIFFERENT, page_size, "float32")
    keys, values = (jax.random.normal(jax.random.key(seed + i), x.shape) for i, x in enumerate(blank[:2]))
    return blank._replace(keys=keys, values=values)


@jax.jit
def filled(source: KVCache, content: jax.typing.ArrayLike, live: jax.typing.ArrayLike) -> KVCache:
    """A pool whose pages hold `content [pages]` int32, so that equal ones are equal, where there is something (`live
    [pages, page_size]` bool), and else what padding must be: keys that are no number, and zeros."""
    content, live = jnp.asarray(content) % DIFFERENT, jnp.asarray(live)
    return source._replace(
        keys=jnp.where(live[:, None, None, :], source.keys[:, content], jnp.nan),
        values=jnp.where(live[:, None, :, None], source.values[:, content], 0.0),
    )
