"""The CPU kernels as JAX functions for use inside jit. Call `load` first.

All floats are float32. KV caches are float32, bfloat16 or INT8 (`jaxspec.step.kv_int8`).
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
from jaxspec.kernels.packed import GROUP

#: Factor of head_dim and page_size, limits of attention.c.
LANES, MAX_ROWS, MAX_DIM, MAX_PAGE = 16, 48, 256, 128
#: Rows up to which a CPU with AMX multiplies faster without tiles (docs/results/kernels.md).
FASTER_UNTILED = 4


_prefix: ContextVar[str] = ContextVar("prefix", default="")


@cache
def load(compiler: str = "") -> str:
    """Build the kernels if needed and register them with XLA. Raises `KernelsUnavailable`.

    Returns the library's name, which identifies code, compiler and CPU.
    `compiler`: see `build`. Its kernels are called only by functions traced within `built_by(compiler)`.
    """
    path = build(compiler or None)
    library = ctypes.CDLL(str(path))
    for name in SYMBOLS:
        jax.ffi.register_ffi_target(compiler + name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return path.stem


@contextmanager
def built_by(compiler: str) -> Iterator[None]:
    """To compare compilers: functions traced in the block call the kernels that `load(compiler)` registered."""
    token = _prefix.set(compiler)
    try:
        yield
    finally:
        _prefix.reset(token)


def _call(name: str, results: Any, **options: Any) -> Any:
    return jax.ffi.ffi_call(_prefix.get() + name, results, **options)


def supports(heads: int, kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether `attention` supports these sizes."""
    fits = head_dim <= MAX_DIM and page_size <= MAX_PAGE and heads // kv_heads <= MAX_ROWS
    return fits and head_dim % LANES == 0 and page_size % LANES == 0


def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Like `jnp.zeros`, but memory is allocated only when it is written (on Linux)."""
    call = _call("jaxspec_zeros", jax.ShapeDtypeStruct(tuple(shape), dtype))
    return jax.jit(call)(np.int32(jnp.dtype(dtype).itemsize))


def linear(
    x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None = None, *, untiled: int = 0
) -> jax.Array:
    """`x [T, in]` float32 times layer `layer` (`[]` int32, default 0) of `weight` (from `packed.pack`) -> `[T, width]`.

    `untiled`: up to this many rows are multiplied without AMX tiles, in another order of sums: on CPUs with AMX a row's
    bits then depend on the number of rows. Raises `ValueError` if dtypes do not fit. If the sizes do not fit those of
    `weight`, the call fails when it runs.
    """
    _check_packed(weight)
    _check(x)
    index = jnp.int32(0) if layer is None else layer.astype(jnp.int32)
    result = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    return _call("jaxspec_linear", result)(
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))), weight, index, np.int32(untiled)
    )


def lookup(weight: jax.Array, tokens: jax.Array, vocab: int, hidden: int) -> jax.Array:
    """Embeddings `[T, hidden]` float32 of `tokens [T]`: columns of `weight` (from `packed.pack`) of `[hidden, vocab]`.

    Tokens out of bounds are clipped. Raises `ValueError` if dtypes do not fit.
    """
    _check_packed(weight)
    result = jax.ShapeDtypeStruct((tokens.shape[0], hidden + -hidden % GROUP), jnp.float32)
    return _call("jaxspec_columns", result)(tokens.astype(jnp.int32), weight, np.int32(vocab))[:, :hidden]


def grouped(
    x: jax.Array, weight: jax.Array, width: int, layer: jax.Array | None, counts: jax.Array, *, untiled: int = 0
) -> jax.Array:
    """Rows `x [N, in]` float32, the first `counts[0]` of them of expert 0 and so on (`[experts]` int32), times their
    experts' matrices in layer `layer` (default 0) of `weight` (from `packed.pack`, all experts of a layer in a row) ->
    `[N, width]`.

    Matrices of experts without rows are not read. `untiled`: as in `linear`, of each expert's rows. Raises `ValueError`
    if dtypes do not fit.
    """
    _check_packed(weight)
    _check(x)
    first = (jnp.int32(0) if layer is None else layer.astype(jnp.int32)) * counts.shape[0]
    result = jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    return _call("jaxspec_grouped", result)(x, weight, first, counts.astype(jnp.int32), np.int32(untiled))


def norm(x: jax.Array, weight: jax.Array, eps: float, bias: jax.Array | None = None) -> jax.Array:
    """Norm of `x [..., size]` over the last axis, times `weight [size]`: by root mean square, or with a `bias [size]`
    by mean and variance.

    The bits of a row do not depend on other rows. Raises `ValueError` if a dtype is not float32.
    """
    _check(x, weight, *(() if bias is None else (bias,)))
    rows = x.reshape(-1, x.shape[-1])
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    more = () if bias is None else (bias,)
    return _call("jaxspec_norm", result)(rows, weight, np.float32(eps), *more).reshape(x.shape)


def probe(data: jax.Array, rounds: int, shares: int = 64) -> jax.Array:
    """Read `data [n]` float32 in `shares`, or with `rounds`, multiply in registers.

    Returns `[shares]`: sums of some of the data, or the number of multiply-adds done.
    """
    call = _call("jaxspec_probe", jax.ShapeDtypeStruct((shares,), jnp.float32))
    return call(data, np.int32(rounds))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array, window: jax.Array,
    position: jax.Array, subtree: jax.Array, first: jax.Array, nodes: jax.Array, committed: jax.Array,
    table: jax.Array, channels: Sequence[jax.Array] = (), cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Tree attention: every node attends to its request's committed pages and to its ancestors in the batch.

    Returns the output `[T, heads, dim]` and the log-sum-exp of the scores `[T, heads]`, to merge it with other parts.

    q `[T, heads, dim]`, k and v `[T, kv_heads, dim]`; keys, values: of a `kv_cache.KVCache`; layer, window (0: none)
    `[]` int32; the others are fields of `jaxspec.step.batch.Batch`. first, nodes, committed and table are not
    checked and must be in bounds. `channels`: for an INT8 cache, scale and zero point of keys, then of values. `cap`:
    softcap of the scores. Raises `ValueError` for unsupported sizes or dtypes.
    """
    if not supports(q.shape[1], k.shape[1], q.shape[2], keys.shape[4]):
        raise ValueError(f"attention: heads of {q.shape}, {k.shape} or pages of {keys.shape} are not supported")
    _check(q, k, v)
    _check_pool(keys, values, channels)
    integers = (layer, window, position, subtree, first, nodes, committed, table)
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    out, lse = _call("jaxspec_attention", results)(
        q, k, v, keys, values, *(x.astype(jnp.int32) for x in integers), np.float32(cap or 0), *channels
    )
    return out, lse


def commit(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array, accepted: jax.Array,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Write accepted tokens (`[T]` bool) to their slots (`[T]`); k, v `[layers, T, kv_heads, dim]`. Returns the pool's
    keys and values, updated in place.

    Numbers for a bfloat16 pool must be rounded to bfloat16 (`KVCache.stored`). Runs after `after` is computed. It is an
    operand because nothing weaker keeps XLA from moving reads of the pool behind the write.
    """
    _check(k, v)
    _check_pool(keys, values)
    pool = (jax.ShapeDtypeStruct(keys.shape, keys.dtype), jax.ShapeDtypeStruct(values.shape, values.dtype))
    call = _call("jaxspec_commit", pool, input_output_aliases={0: 0, 1: 1})
    keys, values = call(keys, values, k, v, slot.astype(jnp.int32), accepted, after)
    return keys, values


def commit_quantized(
    pool: Sequence[jax.Array], k: jax.Array, v: jax.Array, integers: Sequence[jax.Array], accepted: jax.Array,
    after: jax.Array,
) -> Sequence[jax.Array]:  # fmt: skip
    """Like `commit`, for an `Int8KVCache`. Returns the updated `pool`.

    `pool`: keys, values, scale and zero point of keys, those of values, open keys, open values; `integers`: slot, tree,
    place, written, written_tree, written_base, opened, reread and committed of the batch.
    """
    keys, values, *channels, open_keys, open_values = pool
    _check(k, v, open_keys, open_values)
    _check_pool(keys, values, channels)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool]
    call = _call("jaxspec_commit_quantized", results, input_output_aliases={i: i for i in range(len(pool))})
    return call(*pool, k, v, *(x.astype(jnp.int32) for x in integers), accepted, after)


def _check_pool(keys: jax.Array, values: jax.Array, channels: Sequence[jax.Array] = ()) -> None:
    found = [str(x.dtype) for x in (keys, values, *channels)]
    if found not in (["float32"] * 2, ["bfloat16"] * 2, [*["uint8"] * 2, *["bfloat16", "int16"] * 2]):
        raise ValueError(f"the kernels do not support a KV cache of {found}")


def _check_packed(weight: jax.Array) -> None:
    if weight.ndim != 1 or weight.dtype != jnp.uint8:
        raise ValueError(f"packed weights are uint8 [bytes], not {weight.dtype} {weight.shape}")


def _check(*arrays: jax.Array) -> None:
    if any(x.dtype != jnp.float32 for x in arrays):
        raise ValueError(f"the kernels need float32, not {[str(x.dtype) for x in arrays]}")
