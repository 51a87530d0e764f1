"""Programs whose arrays stay where they are, for CUDA graphs.

On GPUs a program is one CUDA graph, which holds the addresses of its arrays. Before each launch XLA rewrites every
operation one of whose arrays has moved since the launch before, conditionals with all their branches. Weights and pools
stay where they are. What the host sends and what a program returns would move, and XLA would let many operations read
the one, and keep other values in the memory of the other. Therefore

* the first operation copies all small inputs to one array, from which the others read;
* results are written last, into arrays that the program takes as an argument and updates in place: an outbox. Outboxes
  take turns, so that one holds results until the host has read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.compilation import compile_ahead
from jaxspec.step.layers import Layers
from jaxspec.step.tensor_parallel import copied, over_devices

T = TypeVar("T")
#: A number that the host does not send.
_NEVER = np.iinfo(np.int32).min


def _steady(fn: Callable[..., Any], moving: Sequence[int]) -> Callable[..., Any]:
    """`fn` with an outbox as one more argument, the last."""

    def program(*arguments: Any) -> tuple[Any, ...]:
        *given, outbox = arguments
        copies, true = _copied([given[i] for i in moving])
        for i, copy in zip(moving, copies, strict=True):
            given[i] = copy
        *state, result = fn(*given)
        # XLA does not know that what the outbox holds is never used, so it keeps nothing else there until the end.
        result = lax.optimization_barrier(result)
        return *state, jax.tree.map(lambda before, x: jnp.where(true, x, before), outbox, result)

    return program


def _copied(arrays: T) -> tuple[T, jax.Array]:
    """These int32 arrays, read from a copy, and True."""
    leaves, treedef = jax.tree.flatten(arrays)
    # XLA would leave out a copy of one array, and without the barrier it would not read from the copy.
    spare = jnp.zeros(1, jnp.int32)
    copy = lax.optimization_barrier(jnp.concatenate([*(leaf.ravel() for leaf in leaves), spare]))
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    parts = [copy[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(treedef, parts), copy[0] > _NEVER


class Build(NamedTuple):
    """What is compiled: a program over the devices of `layers`, and its arguments.

    donate  indices of those that are donated
    moving  indices of those that the host sends or another program returns
    outbox  shapes of the last one, which becomes the last result; None: there is none
    """

    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    moving: tuple[int, ...]
    outbox: Any = None

    @classmethod
    def of(
        cls, layers: Layers, fn: Callable[..., Any], arguments: Sequence[Any], outputs: int, donate: Sequence[int],
        moving: Sequence[int],
    ) -> Build:  # fmt: skip
        """`fn` returns `outputs` values: donated arguments, then its result. Arguments `moving` are pytrees of int32
        arrays; those that are not given are left out."""
        program = over_devices(layers.parallel, fn, arguments, outputs)
        moving = tuple(i for i in moving if i < len(arguments))
        if not layers.steady:
            return cls(program, tuple(arguments), tuple(donate), moving)
        everywhere = None if layers.parallel is None else layers.parallel.everywhere
        outbox = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            jax.eval_shape(program, *arguments)[-1],
        )
        with_outbox, kept = (*arguments, outbox), (*donate, len(arguments))
        program = over_devices(layers.parallel, _steady(fn, moving), with_outbox, outputs)
        return cls(program, with_outbox, kept, moving, outbox)


class Executable:
    """A compiled program, with outboxes of its own if it needs any."""

    def __init__(self, layers: Layers, build: Build, unread: int, one_graph: bool = True, device: Any = None) -> None:
        """`unread`: runs that may start before the result of an earlier one is read; `device`: of the outboxes, None:
        the default one, or those of `layers`."""
        self._outbox = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), build.outbox)
        self._parallel, self._device, self._unread = layers.parallel, device, unread
        self._used = deque[Any]()
        self._compiled = compile_ahead(build.program, *build.arguments, donate=build.donate, one_graph=one_graph)

    def __call__(self, *arguments: Any) -> Any:
        """Start a run. Returns what the program returns."""
        if self._outbox is None:
            return self._compiled(*arguments)
        results = self._compiled(*arguments, self._next())
        self._used.append(results[-1])
        return results

    def _next(self) -> Any:
        if len(self._used) > self._unread:
            return self._used.popleft()
        return copied(self._parallel, jax.device_put(self._outbox, self._device))

    def reset(self) -> None:
        """Forget the outboxes: a failed run may have lost their values."""
        self._used.clear()
