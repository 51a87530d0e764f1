"""Programs whose arrays stay where they are, for CUDA graphs.

On GPUs a program is one CUDA graph, which holds the addresses of its arrays. Before each launch XLA rewrites every
operation one of whose arrays has moved since the launch before, conditionals with all their branches. Weights and pools
stay where they are. The packed batch and what programs return are new arrays in every run, and XLA would let many
operations read the one, and keep other values in the memory of the other. Therefore

* one operation copies the small arguments that move to one array, from which the others read;
* results are written last, into arrays that the program takes as an argument and updates in place: an outbox. Outboxes
  take turns, so that one holds results until the host has read them.

Token masks, which are large and sent in steps with constrained requests only, are read where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxspec.compilation import compile_ahead, results_of
from jaxspec.step.layers import Layers
from jaxspec.step.tensor_parallel import over_devices

T = TypeVar("T")
#: No array that moves begins with this number.
_NEVER = np.iinfo(np.int32).min


def _steady(fn: Callable[..., Any], moving: Sequence[int]) -> Callable[..., Any]:
    """`fn` with an outbox as one more argument, the last."""

    def program(*arguments: Any) -> tuple[Any, ...]:
        *given, outbox = arguments
        copies, always = _from_one_copy([given[i] for i in moving])
        for i, copy in zip(moving, copies, strict=True):
            given[i] = copy
        *state, result = fn(*given)
        # For XLA the values before may still be needed, so it keeps nothing else in these arrays.
        result = lax.optimization_barrier(result)
        return *state, jax.tree.map(lambda before, x: jnp.where(always, x, before), outbox, result)

    return program


def _from_one_copy(arrays: T) -> tuple[T, jax.Array]:
    """These int32 arrays as parts of one copy, and a flag that is always set, which XLA cannot know."""
    flat, parts_of = ravel_pytree(arrays)
    # XLA would leave out a copy of one array, so a number is appended; without the barrier it would not read the copy.
    copy = lax.optimization_barrier(jnp.append(flat, 0))
    return parts_of(copy[:-1]), copy[0] > _NEVER


class ProgramSpec(NamedTuple):
    """What is compiled: a program over the devices of `layers`, and its arguments.

    donate  indices of the arguments that are donated
    moving  indices of those that are new arrays in every run
    outbox  shapes and dtypes of the last argument, which becomes the last result; None: there is none
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
    ) -> ProgramSpec:  # fmt: skip
        """`fn` returns `outputs` values: the donated arguments, then its result. Arguments `moving` are pytrees of
        small int32 arrays; indices from `len(arguments)` on are left out."""
        moving = tuple(i for i in moving if i < len(arguments))
        if not layers.steady:
            program = over_devices(layers.parallel, fn, arguments, outputs)
            return cls(program, tuple(arguments), tuple(donate), moving)
        fn = jax.jit(fn, inline=True)  # traced once: for the shapes of its result, and to compile it
        program = over_devices(layers.parallel, fn, arguments, outputs)
        everywhere = None if layers.parallel is None else layers.parallel.everywhere
        outbox = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            results_of(program, *arguments)[-1],
        )
        with_outbox, kept = (*arguments, outbox), (*donate, len(arguments))
        program = over_devices(layers.parallel, _steady(fn, moving), with_outbox, outputs)
        return cls(program, with_outbox, kept, moving, outbox)


class Executable:
    """A compiled program, with outboxes of its own if it needs any."""

    def __init__(
        self, layers: Layers, spec: ProgramSpec, unread: int, one_graph: bool = True, device: Any = None
    ) -> None:
        """`unread`: later runs that may start before a result is read; `device`: where the outboxes are, None: on the
        default device or, with `layers.parallel`, on all of its devices."""
        self._outbox = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.outbox)
        self._place = device if layers.parallel is None else layers.parallel.everywhere
        self._unread = unread
        self._used = deque[Any]()
        self._compiled = compile_ahead(spec.program, *spec.arguments, donate=spec.donate, one_graph=one_graph)

    def __call__(self, *arguments: Any) -> Any:
        """Start a run. Returns what the program returns, without the outbox among the arguments.

        With outboxes the result can be read until `unread` + 1 later runs have started: then its arrays are deleted,
        and reading them raises RuntimeError. If `unread` is 0, it must not be an argument of the next run.
        """
        if self._outbox is None:
            return self._compiled(*arguments)
        results = self._compiled(*arguments, self._next())
        self._used.append(results[-1])
        return results

    def _next(self) -> Any:
        if len(self._used) > self._unread:
            return self._used.popleft()
        return jax.device_put(self._outbox, self._place)

    def reset(self) -> None:
        """Forget the outboxes: a failed run may have lost their values."""
        self._used.clear()
