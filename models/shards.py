"""How a decoder is split over devices (tensor parallelism): which heads, columns and rows each device has.

As in Megatron-LM (Shoeybi et al. 2019, §3): the first product of attention and MLP is split by columns, the second by
rows, so that each needs one sum over devices. All devices have the same shapes. Where heads or columns do not divide
evenly, zeros fill the gaps: they add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxspec.models.config import DecoderConfig

#: Parts of a layer, embedding and head that are split -> the axis along which they are. Devices have copies of all
#: others: they are small, or, like a drafter's projections, cost less to read than their outputs to exchange.
SPLIT = {
    "qkv": 1,
    "qkv_bias": 0,
    "o": 0,
    "gate_up": 1,
    "gate_up_bias": 0,
    "down": 0,
    "experts_gate_up": 2,
    "experts_down": 1,
    "shared_gate_up": 1,
    "shared_down": 0,
    "embed": 1,
    "head": 1,
}


def split_axis(name: str) -> int | None:
    """The axis along which the weight `name` is split; None: every device has all of it."""
    return SPLIT.get(_part(name))


def _part(name: str) -> str:
    """The last part of a weight's name: `qkv` of `layers.0.qkv`."""
    return name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Shards:
    """The parts of a decoder on each of `devices` devices. Raises `ValueError` if it cannot be split."""

    config: DecoderConfig
    devices: int

    def __post_init__(self) -> None:
        if self.config.qk_norm == "all" and self.devices > 1:
            raise ValueError(f"{self.config.family} models normalise queries over all heads, which are not split")

    @cached_property
    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The KV head in each slot of each device `[devices, slots]`, and its query heads `[devices, slots * group]`;
        -1: none.

        With fewer KV heads than devices, several devices have the same KV head, each with some of its query heads.
        """
        c = self.config
        group = c.num_heads // c.num_kv_heads
        best: tuple[int, int, int] | None = None
        for size in range(1, group + 1):  # query heads per slot
            slots = -(-c.num_kv_heads * -(-group // size) // self.devices)
            # KV of one more head costs memory in every page; then come idle query heads.
            if best is None or (slots, slots * size, -size) < best:
                best = slots, slots * size, -size
        assert best is not None
        slots, size = best[0], -best[2]
        kv = np.full(self.devices * slots, -1)
        queries = np.full((self.devices * slots, size), -1)
        parts = -(-group // size)
        for unit in range(c.num_kv_heads * parts):
            head, part = divmod(unit, parts)
            mine = np.arange(part * size, min((part + 1) * size, group))
            kv[unit], queries[unit, : len(mine)] = head, head * group + mine
        return kv.reshape(self.devices, slots), queries.reshape(self.devices, slots * size)

    @cached_property
    def local(self) -> DecoderConfig:
        """The configuration of one device's part."""
        c, (kv, queries) = self.config, self.heads
        experts = c.experts and replace(
            c.experts, width=self._share(c.experts.width), shared_width=self._share(c.experts.shared_width)
        )
        return replace(
            c, num_heads=queries.shape[1], num_kv_heads=kv.shape[1], intermediate_size=self._share(c.intermediate_size),
            experts=experts,
        )  # fmt: skip

    @property
    def pooled(self) -> DecoderConfig:
        """The page pool's configuration: it has as many KV heads as all devices together have places for."""
        return replace(self.config, num_heads=self.heads[1].size, num_kv_heads=self.heads[0].size)

    def arrange(self, name: str, weight: np.ndarray) -> np.ndarray:
        """The devices' parts of a weight, one after the other along its `split_axis`; other weights as they are."""
        axis = split_axis(name)
        if axis is None:
            return weight
        index = self._index(_part(name), weight.shape[axis]).reshape(-1)
        if np.array_equal(index, np.arange(weight.shape[axis])):
            return weight
        out = np.take(weight, np.maximum(index, 0), axis)
        gaps = np.flatnonzero(index < 0)
        out[(slice(None),) * axis + (gaps,)] = 0
        return out

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part of a weight."""
        axis = split_axis(name)
        if axis is None:
            return shape
        width = self._index(_part(name), shape[axis]).shape[1]
        return (*shape[:axis], width, *shape[axis + 1 :])

    def local_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """`local_shape` of several weights."""
        return {name: self.local_shape(name, shape) for name, shape in shapes.items()}

    def _share(self, width: int) -> int:
        return -(-width // self.devices)

    def _index(self, part: str, size: int) -> np.ndarray:
        """Where each device's columns (or rows) `[devices, local]` are among the `size` of the weight; -1: zeros."""
        c = self.config
        if part in ("qkv", "qkv_bias", "o"):
            kv, queries = (self._channels(heads) for heads in self.heads)
            if part == "o":
                return queries
            places = queries, _moved(kv, c.q_size), _moved(kv, c.q_size + c.kv_size)
            return np.concatenate(places, 1)
        gated = c.gated if part in ("gate_up", "gate_up_bias") else part in ("experts_gate_up", "shared_gate_up")
        halves = 2 if gated else 1  # gate and up, each split
        one = self._even(size // halves)
        return np.concatenate([_moved(one, i * (size // halves)) for i in range(halves)], 1)

    def _channels(self, heads: np.ndarray) -> np.ndarray:
        """The channels of heads `[devices, heads]`."""
        dim = self.config.head_dim
        channels = heads[..., None] * dim + np.arange(dim)
        return np.where(heads[..., None] < 0, -1, channels).reshape(len(heads), -1)

    def _even(self, size: int) -> np.ndarray:
        index = np.arange(self.devices * self._share(size))
        return np.where(index < size, index, -1).reshape(self.devices, -1)


def _moved(index: np.ndarray, by: int) -> np.ndarray:
    return np.where(index < 0, -1, index + by)
