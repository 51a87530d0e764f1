"""How a draft tree grows from level to level: a beam of the likeliest paths, or a fixed shape of children or draws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling_params import GREEDY_BELOW
from jaxspec.step.batch import Batch
from jaxspec.step.sampler import argmax, exponential_noise


class Level(NamedTuple):
    """The nodes of a level, `[R, W]` each.

    column   int32, index of the token in the drafter's vocabulary
    parent   int32, index of the parent in the level above
    logprob  float32, log-probability of the path to the node, -inf where there is no node
    """

    column: jax.Array
    parent: jax.Array
    logprob: jax.Array


class Growth(Protocol):
    """Grows one level of a tree.

    `width` W is the most nodes of a level; `draws` says whether nodes are random draws, as rejection sampling needs.
    """

    @property
    def width(self) -> int: ...
    @property
    def draws(self) -> bool: ...

    def grow(self, logits: jax.Array, path: jax.Array, level: jax.Array, batch: Batch, position: jax.Array) -> Level:
        """The level below N nodes with logits `[R, N, V']` and path log-probabilities `[R, N]`. Traced.

        `level` [] counts from 0; `batch` has each request's sampling inputs; the new nodes are at `position [R]`.
        """
        ...


@dataclass(frozen=True)
class Beam:
    """Keeps the W nodes of each level with the most likely paths."""

    width: int
    draws = False

    def grow(self, logits: jax.Array, path: jax.Array, level: jax.Array, batch: Batch, position: jax.Array) -> Level:
        r, n, vocab = logits.shape
        flat = logits.reshape(r * n, vocab)
        logprob, column = top(flat, self.width)
        logprob = (logprob - jax.nn.logsumexp(flat, -1, keepdims=True)).reshape(r, n, -1) + path[..., None]
        best, place = top(logprob.reshape(r, -1), self.width)
        column = jnp.take_along_axis(column.reshape(r, -1), place, 1, mode="promise_in_bounds")
        return Level(column, place // self.width, best)


@dataclass(frozen=True)
class Expansion:
    """Keeps the `widths[j]` likeliest children of every node of level j, siblings best first (SpecInfer's expansion).

    A beam of the same width cannot stand in for it: its likeliest paths may all run through one node. Raises
    `ValueError` for an empty level.
    """

    widths: tuple[int, ...]
    draws = False

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"every level must be at least one wide, not {self.widths}")

    @property
    def width(self) -> int:
        return prod(self.widths)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Each node's parent and its rank among its siblings, `[levels, W]` int32; rank -1 where there is no node."""
        parent, rank = np.zeros((2, len(self.widths), self.width), np.int32)
        nodes = 1
        for level, k in enumerate(self.widths):
            parent[level, : nodes * k], rank[level] = np.repeat(np.arange(nodes), k), -1
            rank[level, : nodes * k] = np.tile(np.arange(k), nodes)
            nodes *= k
        return parent, rank

    def grow(self, logits: jax.Array, path: jax.Array, level: jax.Array, batch: Batch, position: jax.Array) -> Level:
        r, n, vocab = logits.shape
        parents, ranks = (jnp.asarray(x)[level] for x in self._places)
        scaled, score = self._scored(logits, batch, position)
        _, column = top(score.reshape(r * n, vocab), max(self.widths))
        column = column.reshape(r, n, -1)[:, parents, jnp.maximum(ranks, 0)]  # [R, W]
        logit = jnp.take_along_axis(scaled[:, parents], column[..., None], 2)[..., 0]
        logprob = path[:, parents] + logit - jax.nn.logsumexp(scaled, -1)[:, parents]
        return Level(column, jnp.broadcast_to(parents, (r, self.width)), jnp.where(ranks >= 0, logprob, -jnp.inf))

    def _scored(self, logits: jax.Array, batch: Batch, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The logits whose softmax the probabilities are, and the scores that order children; both `[R, N, V']`."""
        return logits, logits


@dataclass(frozen=True)
class Draws(Expansion):
    """Draws `widths[j]` children of every node of level j from the drafter's distribution, without replacement.

    Siblings stand in the order in which they were drawn. Greedy requests get the likeliest children.

    All nodes of a request at one position share their noise, since at most one of them is used. The target's sampling
    uses another stream, because it must be independent of the draws.
    """

    draws = True

    def _scored(self, logits: jax.Array, batch: Batch, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        scaled = tempered(logits, batch)
        noise = jnp.log(exponential_noise(batch.seed ^ _DRAFT_STREAM, position, logits.shape[-1]))
        greedy = (batch.temperature < GREEDY_BELOW)[:, None]
        return scaled, scaled - jnp.where(greedy, 0.0, noise)[:, None]


#: XORed to a request's seed: the drafter's noise must differ from the target's.
_DRAFT_STREAM = 0x5BD1E995


def tempered(logits: jax.Array, batch: Batch) -> jax.Array:
    """Logits `[R, N, V']` divided by each request's temperature; unchanged for greedy requests."""
    temperature = jnp.where(batch.temperature < GREEDY_BELOW, 1.0, batch.temperature)
    return logits / temperature[:, None, None]


def top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of `[N, V]`, descending: values and indices, `[N, count]` each.

    Takes one maximum after another, for small counts: on CPU, XLA's sort of thousands takes a hundred times as long.
    Without a loop, and so with fewer kernels than the sampler's `top`, which is for more.
    """
    values, places = [], []
    for _ in range(count):
        place = argmax(x)
        values.append(jnp.take_along_axis(x, place[:, None], 1, mode="promise_in_bounds")[:, 0])
        places.append(place)
        x = jnp.where(jnp.arange(x.shape[1]) == place[:, None], -jnp.inf, x)
    return jnp.stack(values, 1), jnp.stack(places, 1)
