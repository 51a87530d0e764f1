"""The CPU kernels as JAX functions, to be used inside jit; `load` must have succeeded before.

All numbers are float32, beside pools that are INT8 by channels (`jaxspec.step.kv_int8`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.build import SYMBOLS, build

#: Columns of a weight panel, what heads and pages are multiples of, and the limits of attention.c.
PANEL, LANES, MAX_ROWS, MAX_DIM, MAX_PAGE = 32, 16, 48, 256, 128


_prefix: ContextVar[str] = ContextVar("prefix", default="")


@cache
def load(compiler: str = "") -> str:
    """Build the kernels if need be and make them known to XLA. -> the library's name, another one for other code,
    another compiler or another CPU. Raises `KernelsUnavailable`.

    `compiler`: see `build`; what it made is only called by what is traced within `built_by(compiler)`.
    """
    path = build(compiler or None)
    library = ctypes.CDLL(str(path))
    for name in SYMBOLS:
        jax.ffi.register_ffi_target(compiler + name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return path.stem


@contextmanager
def built_by(compiler: str) -> Iterator[None]:
    """To compare compilers: what is traced within calls the kernels that `load(compiler)` made known."""
    token = _prefix.set(compiler)
    try:
        yield
    finally:
        _prefix.reset(token)


def _call(name: str, results: Any, **more: Any) -> Any:
    return jax.ffi.ffi_call(_prefix.get() + name, results, **more)


def supports(heads: int, kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether `attention` can take these sizes."""
    fits = head_dim <= MAX_DIM and page_size <= MAX_PAGE and heads // kv_heads <= MAX_ROWS
    return fits and head_dim % LANES == 0 and page_size % LANES == 0


def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    """As `jnp.zeros`, but memory is taken, and time, only where the array is written later (on Linux)."""
    call = _call("jaxspec_zeros", jax.ShapeDtypeStruct(tuple(shape), dtype))
    return jax.jit(call)(np.int32(jnp.dtype(dtype).itemsize))


def panels(matrices: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Weights `[in, out]` of each layer as `linear` reads them: `[layers, ceil(out / 32), in, 32]` float32, padded with
    zeros. The array is aligned so that JAX takes it as it is: there are hundreds of megabytes of them."""
    depth, width = matrices[0].shape
    full, rest = divmod(width, PANEL)
    out = _aligned((len(matrices), full + (rest > 0), depth, PANEL))
    for to, matrix in zip(out, matrices, strict=True):
        to[:full] = matrix[:, : full * PANEL].reshape(depth, full, PANEL).swapaxes(0, 1)
        if rest:
            to[full, :, :rest], to[full, :, rest:] = matrix[:, full * PANEL :], 0
    return out


def _aligned(shape: Sequence[int]) -> np.ndarray:
    """An uninitialised float32 array that begins at a multiple of 64 bytes."""
    size = 4 * int(np.prod(shape))
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


def linear(x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None) -> jax.Array:
    """`x [T, in]` times layer `layer` (int32, default 0) of `weight`, from `panels` -> `[T, width]`."""
    if x.ndim != 2 or weight.ndim != 4 or x.shape[1] != weight.shape[2] or -(-width // PANEL) != weight.shape[1]:
        raise ValueError(f"linear: x {x.shape} does not fit weights {weight.shape} of width {width}")
    _check(x, weight)
    index = jnp.int32(0) if layer is None else layer.astype(jnp.int32)
    return _call("jaxspec_linear", jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32))(x, weight, index)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array, window: jax.Array,
    position: jax.Array, subtree: jax.Array, first: jax.Array, nodes: jax.Array, committed: jax.Array,
    table: jax.Array, channels: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Each node over its request's committed pages and its ancestors in the batch.

    -> `[T, heads, dim]` and the logarithm of each softmax's sum `[T, heads]`, to merge it with other parts.

    q `[T, heads, dim]`, k and v `[T, kv_heads, dim]`; keys, values of a `kv_cache.KVCache`; layer, window (0: none)
    `[]` int32; the rest are fields of `jaxspec.step.batch.Batch`, of which first, nodes, committed and table must be
    in bounds: they are not checked. `channels`: of a quantised pool, scale and zero point of keys, then of values.
    """
    if not supports(q.shape[1], k.shape[1], q.shape[2], keys.shape[4]):
        raise ValueError(f"attention: heads of {q.shape}, {k.shape} or pages of {keys.shape} are not supported")
    _check(q, k, v)
    _check_pool(keys, values, channels)
    integers = (layer, window, position, subtree, first, nodes, committed, table)
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    out, lse = _call("jaxspec_attention", results)(
        q, k, v, keys, values, *(x.astype(jnp.int32) for x in integers), *channels
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
    call = _call("jaxspec_commit", pool, input_output_aliases={0: 0, 1: 1})
    keys, values = call(keys, values, k, v, slot.astype(jnp.int32), accepted, after)
    return keys, values


def commit_quantized(
    pool: Sequence[jax.Array], k: jax.Array, v: jax.Array, integers: Sequence[jax.Array], accepted: jax.Array,
    after: jax.Array,
) -> Sequence[jax.Array]:  # fmt: skip
    """`pool` with accepted tokens (`[T]` bool) at their slots; k, v `[layers, T, kv_heads, dim]`. Not before `after`.

    `pool`: keys, values, scale and zero point of keys and of values, open keys and values, of a `Int8KVCache`;
    `integers`: slot, tree, place, written, written_tree, written_base, opened, reread and committed of the batch.
    """
    keys, values, *channels, open_keys, open_values = pool
    _check(k, v, open_keys, open_values)
    _check_pool(keys, values, channels)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool]
    call = _call("jaxspec_commit_quantized", results, input_output_aliases={i: i for i in range(len(pool))})
    return call(*pool, k, v, *(x.astype(jnp.int32) for x in integers), accepted, after)


def _check_pool(keys: jax.Array, values: jax.Array, channels: Sequence[jax.Array]) -> None:
    if not channels:
        return _check(keys, values)
    found = [jnp.dtype(x.dtype) for x in (keys, values, *channels)]
    if found != [jnp.dtype(x) for x in (jnp.uint8, jnp.uint8, *(jnp.bfloat16, jnp.int16) * 2)]:
        raise ValueError(f"the kernels do not take a quantised pool of {[str(x) for x in found]}")


def _check(*arrays: jax.Array) -> None:
    if any(x.dtype != jnp.float32 for x in arrays):
        raise ValueError(f"the kernels take float32, got {[str(x.dtype) for x in arrays]}")
