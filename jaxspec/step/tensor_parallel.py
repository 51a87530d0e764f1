"""Tensor parallelism: weights, KV heads and programs over several devices (`models.shards` says what is where).

Every device runs the same step on the same batch, each with its heads and its columns of the MLP. Two sums over devices
per layer and one exchange of logits make the results equal on all of them, so acceptance, sampling and everything the
host decides are as on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import ConfigError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.layers import XLA
from jaxspec.models.shards import Shards, split_axis

#: Name of the mesh's axis.
_AXIS = "tensor"
T = TypeVar("T")


def _total(x: jax.Array) -> jax.Array:
    return lax.psum(x, _AXIS)


def _gather(x: jax.Array, width: int) -> jax.Array:
    return lax.all_gather(x, _AXIS, axis=x.ndim - 1, tiled=True)[..., :width]


#: The operations of a decoder of which each device has a part, for programs of `TensorParallel.program`.
SHARDED = XLA._replace(total=_total, gather=_gather)


class TensorParallel:
    """Devices that share a model. `devices`: two or more JAX devices."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.size = len(devices)
        self.mesh = Mesh(np.asarray(devices), (_AXIS,))
        #: Each device has the whole array.
        self.everywhere = NamedSharding(self.mesh, P())
        self._shards = cache(lambda config: Shards(config, self.size))

    def shards(self, config: DecoderConfig) -> Shards:
        """How a model is split. Raises `ConfigError` if it cannot be."""
        try:
            return self._shards(config)
        except ValueError as error:
            raise ConfigError(f"tensor_parallel_size: {error}") from None

    def weight_sharding(self, name: str) -> NamedSharding:
        """The sharding of an array from `Shards.arrange`."""
        axis = split_axis(name)
        return self.everywhere if axis is None else self._along(axis)

    def put(self, shards: Shards, name: str, weight: np.ndarray | jax.Array) -> jax.Array:
        """A weight on its devices."""
        return jax.device_put(shards.arrange(name, np.asarray(weight)), self.weight_sharding(name))

    def copied(self, tree: T) -> T:
        """Arrays of which every device gets a copy."""
        return jax.device_put(tree, self.everywhere)

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Zeros for an array of a KV cache, split by heads, or for a table, which every device has whole."""
        return jnp.zeros(shape, dtype, device=self.pool_sharding(len(shape)))

    def pool_sharding(self, dimensions: int) -> NamedSharding:
        """The sharding of an array of a KV cache: heads are the third dimension of all but the feature pool."""
        return self._along(2) if dimensions > 3 else self.everywhere

    def rows_sharding(self, dimensions: int, memory: str | None = None) -> NamedSharding:
        """The sharding of a page's rows, which have no dimension of pages. `memory`: kind of memory."""
        return self._along(1, memory) if dimensions > 2 else NamedSharding(self.mesh, P(), memory_kind=memory)

    def _along(self, axis: int, memory: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, P(*[None] * axis, _AXIS), memory_kind=memory)

    def program(self, fn: Callable[..., Any], arguments: Sequence[Any], outputs: int) -> Callable[..., Any]:
        """`fn` on every device with its parts of `arguments`.

        `fn` returns `outputs` values: the KV cache, its second argument, and others that are equal on all devices.
        """
        specs = jax.tree.map(_spec, tuple(arguments))
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=specs, out_specs=(specs[1], *[P()] * (outputs - 1)), check_vma=False
        )


def _spec(x: Any) -> P:
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def bytes_on_devices(tree: Any) -> dict[str, int]:
    """Bytes of these arrays that each device holds, by its name."""
    held: Counter[str] = Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[str(shard.device)] += shard.data.nbytes
    return dict(held)


def over_devices(
    parallel: TensorParallel | None, fn: Callable[..., Any], arguments: Sequence[Any], outputs: int
) -> Callable[..., Any]:
    """`TensorParallel.program`, or `fn` itself on one device."""
    return fn if parallel is None else parallel.program(fn, arguments, outputs)


def copied(parallel: TensorParallel | None, tree: T) -> T:
    """`TensorParallel.copied`, or the arrays themselves on one device."""
    return tree if parallel is None else parallel.copied(tree)


def parallel_over(size: int) -> TensorParallel | None:
    """The first `size` devices; None for one. Raises `ConfigError` if there are fewer."""
    if size == 1:
        return None
    devices = jax.devices()
    if len(devices) < size:
        hint = f"; on a CPU set JAX_NUM_CPU_DEVICES={size}" if devices[0].platform == "cpu" else ""
        raise ConfigError(f"tensor_parallel_size: there are {len(devices)} devices, not {size}{hint}")
    return TensorParallel(devices[:size])
