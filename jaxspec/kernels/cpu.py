"""The CPU kernels as JAX functions, to be used inside jit. float32 only; `load` must have succeeded before."""

from __future__ import annotations

import ctypes
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.build import build

#: Columns of a weight panel, positions a vector holds, and the limits of attention.c.
PANEL, LANES, MAX_ROWS, MAX_DIM, MAX_PAGE = 32, 16, 48, 256, 128


@cache
def load() -> None:
    """Build the kernels if need be and make them known to XLA. Raises `KernelsUnavailable`."""
    library = ctypes.CDLL(str(build()))
    for name in ("jaxspec_linear", "jaxspec_attention", "jaxspec_commit"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def supports(heads: int, kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether `attention` can take these sizes."""
    fits = head_dim <= MAX_DIM and page_size <= MAX_PAGE and heads // kv_heads <= MAX_ROWS
    return fits and head_dim % LANES == 0 and page_size % LANES == 0


def panels(matrices: np.ndarray) -> np.ndarray:
    """Weights `[layers, in, out]` as `linear` reads them: `[layers, ceil(out / 32), in, 32]`, padded with zeros."""
    layers, depth, width = matrices.shape
    padded = np.pad(matrices, ((0, 0), (0, 0), (0, -width % PANEL)))
    return np.ascontiguousarray(padded.reshape(layers, depth, -1, PANEL).swapaxes(1, 2))


def linear(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None) -> jax.Array:
    """`x [T, in]` times layer `layer` (int32, default 0) of `weight`, from `panels` -> `[T, width]`."""
    if x.ndim != 2 or weight.ndim != 4 or x.shape[1] != weight.shape[2] or -(-width // PANEL) != weight.shape[1]:
        raise ValueError(f"linear: x {x.shape} does not fit weights {weight.shape} of width {width}")
    _check(x, weight)
    index = jnp.int32(0) if layer is None else layer.astype(jnp.int32)
    return jax.ffi.ffi_call("jaxspec_linear", jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32))(x, weight, index)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array, window: jax.Array,
    position: jax.Array, subtree: jax.Array, first: jax.Array, nodes: jax.Array, committed: jax.Array,
    table: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Each node over its request's committed pages and its ancestors in the batch.

    -> `[T, heads, dim]` and the logarithm of each softmax's sum `[T, heads]`, to merge it with other parts.

    q `[T, heads, dim]`, k and v `[T, kv_heads, dim]`; keys, values: `jaxspec.step.pool.Pool`; layer, window (0: none)
    `[]` int32; the rest are fields of `jaxspec.step.batch.Batch`, of which first, nodes, committed and table must be
    in bounds: they are not checked.
    """
    if not supports(q.shape[1], k.shape[1], q.shape[2], keys.shape[4]):
        raise ValueError(f"attention: heads of {q.shape}, {k.shape} or pages of {keys.shape} are not supported")
    _check(q, k, v, keys, values)
    integers = (layer, window, position, subtree, first, nodes, committed, table)
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    out, lse = jax.ffi.ffi_call("jaxspec_attention", results)(
        q, k, v, keys, values, *(x.astype(jnp.int32) for x in integers)
    )
    return out, lse


def commit(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array, accepted: jax.Array,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The pool's keys and values with accepted tokens (`[T]` bool) at their slots (`[T]`); k, v `[layers, T, …]`.

    Not before `after` is there, whatever it is: nothing weaker than an operand keeps XLA from moving reads behind it.
    """
    _check(keys, values, k, v)
    pool = (jax.ShapeDtypeStruct(keys.shape, jnp.float32), jax.ShapeDtypeStruct(values.shape, jnp.float32))
    call = jax.ffi.ffi_call("jaxspec_commit", pool, input_output_aliases={0: 0, 1: 1})
    keys, values = call(keys, values, k, v, slot.astype(jnp.int32), accepted, after)
    return keys, values


def _check(*arrays: jax.Array) -> None:
    if any(x.dtype != jnp.float32 for x in arrays):
        raise ValueError(f"the kernels take float32, got {[str(x.dtype) for x in arrays]}")
