"""How a draft tree grows from level to level: by a beam of the likeliest paths, or by draws in a shape set before."""

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
from jaxspec.step.sampler import argmax, clocks


class Level(NamedTuple):
    """The nodes of a level, `[R, W]` each: the column of its token, its parent's place in the level above (int32), and
    the log-probability of the path to it, minus infinity where there is no node."""

    column: jax.Array
    parent: jax.Array
    logprob: jax.Array


class Growth(Protocol):
    """`width` W: most nodes of a level; `draws`: whether rejection sampling may judge what it grows."""

    @property
    def width(self) -> int: ...
    @property
    def draws(self) -> bool: ...

    def grow(self, logits: jax.Array, path: jax.Array, level: jax.Array, batch: Batch, position: jax.Array) -> Level:
        """The level below N nodes with logits `[R, N, V']` and path log-probabilities `[R, N]`.

        `level` [] counts from 0; `batch` says how each request chooses; the new nodes stand at `position [R]`.
        """
        ...


@dataclass(frozen=True)
class Beam:
    """The W most likely nodes of each level, by the probability of their path."""

    width: int
    draws = False

    def grow(self, logits: jax.Array, path: jax.Array, level: jax.Array, batch: Batch, position: jax.Array) -> Level:
        r, n, vocab = logits.shape
        flat = logits.reshape(r * n, vocab)
        logprob, column = top(flat, self.width)
        logprob = (logprob - jax.nn.logsumexp(flat, -1, keepdims=True)).reshape(r, n, -1) + path[..., None]
        best, place = top(logprob.reshape(r, -1), self.width)
        column = jnp.take_along_axis(column.reshape(r, -1), place, 1)
        return Level(column, place // self.width, best)


@dataclass(frozen=True)
class Draws:
    """Every node of level j has `widths[j]` children, drawn from the drafter's distribution without replacement, in the
    order of their places; for greedy requests, its likeliest.

    A request's noise at a position is the same at every node: only one of them is ever used. It is another stream than
    the target's own, which must not know what was drawn.
    """

    widths: tuple[int, ...]
    draws = True

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"every level must be at least one wide, not {self.widths}")

    @property
    def width(self) -> int:
        return prod(self.widths)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Parent's place and rank among its children, `[levels, W]` int32; rank -1: no node."""
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
        scaled = tempered(logits, batch)
        noise = jnp.log(clocks(batch.seed ^ _OWN, position, vocab))
        greedy = (batch.temperature < GREEDY_BELOW)[:, None]
        score = scaled - jnp.where(greedy, 0.0, noise)[:, None]
        _, column = top(score.reshape(r * n, vocab), max(self.widths))
        column = column.reshape(r, n, -1)[:, parents, jnp.maximum(ranks, 0)]  # [R, W]
        own = jnp.take_along_axis(scaled[:, parents], column[..., None], 2)[..., 0]
        logprob = path[:, parents] + own - jax.nn.logsumexp(scaled, -1)[:, parents]
        return Level(column, jnp.broadcast_to(parents, (r, self.width)), jnp.where(ranks >= 0, logprob, -jnp.inf))


#: Makes the key of the drafter's noise out of a request's.
_OWN = 0x5BD1E995


def tempered(logits: jax.Array, batch: Batch) -> jax.Array:
    """`[R, N, V']` by each request's temperature, greedy ones' as they are."""
    temperature = jnp.where(batch.temperature < GREEDY_BELOW, 1.0, batch.temperature)
    return logits / temperature[:, None, None]


def top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row, descending, `[N, V]` -> values and places `[N, count]`; count is small.

    One maximum after another: a sort of thousands takes XLA on CPU a hundred times as long.
    """
    values, places = [], []
    for _ in range(count):
        place = argmax(x)
        values.append(jnp.take_along_axis(x, place[:, None], 1)[:, 0])
        places.append(place)
        x = jnp.where(jnp.arange(x.shape[1]) == place[:, None], -jnp.inf, x)
    return jnp.stack(values, 1), jnp.stack(places, 1)
