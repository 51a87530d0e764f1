"""Ahead-of-time compilation, the persistent cache of compiled programs, and a counter of compilations."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import jax.monitoring

from jaxspec import compiled_cache
from jaxspec.paths import cache_folder

_here = threading.local()
#: On GPUs a program is one CUDA graph: XLA's default leaves conditionals and loops out, and each of them waits for the
#: host. Needs a driver for CUDA 12.3.
_ONE_GRAPH: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
    )
}


def without_symbols() -> None:
    """Keep LLVM from running `llvm-symbolizer`, where that is installed, for stack traces that are not read.

    XLA's GPU compiler takes several of them for each kernel: a step compiled in 78 s instead of 5 s.
    """
    os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")


def return_free_memory() -> None:
    """Give memory that compilers have freed back to the system; glibc would keep it, hundreds of megabytes."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def compile_ahead(
    fn: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = (), one_graph: bool = True
) -> jax.stages.Compiled:
    """Compile `fn` for arguments like these: arrays, or shapes and dtypes. `donate`: indices of donated arguments.

    `one_graph`: on GPUs, as one CUDA graph; else with XLA's default. Benchmarks compare them. Only shapes, dtypes and
    devices are read, so arrays may be donated meanwhile in another thread.
    """
    options = graph_options(jax.default_backend()) if one_graph else None
    return lower_ahead(fn, *arguments, donate=donate).compile(compiler_options=options)


def lower_ahead(
    fn: Callable[..., Any], *arguments: Any, donate: int | tuple[int, ...] = (), platform: str | None = None
) -> jax.stages.Lowered:
    """Lower a program without compiling it, see `compile_ahead`. `platform`: None: the default device's."""
    # Full float32 products: GPUs use TF32 by default, which breaks exactness.
    with jax.default_matmul_precision("float32"):
        traced = jax.jit(fn, donate_argnums=donate).trace(*jax.tree.map(_abstract, arguments))
        return traced.lower(lowering_platforms=(platform,) if platform else None)


def results_of(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Shapes and dtypes of what `fn` returns. If it is jitted, `compile_ahead` does not trace it again."""
    with jax.default_matmul_precision("float32"):
        return jax.eval_shape(fn, *jax.tree.map(_abstract, arguments))


def graph_options(backend: str) -> dict[str, str | bool]:
    """Compiler options with which a program is one CUDA graph on a GPU; none for other backends."""
    return dict(_ONE_GRAPH) if backend == "gpu" else {}


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    # As in a call of a jitted function, only arrays that were put on a device explicitly decide where it runs.
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if getattr(x, "committed", False) else None)


def use_cache(folder: str | None) -> None:
    """Keep compiled programs in `folder`: None is the default folder, "" keeps none.

    Without effect if `JAX_COMPILATION_CACHE_DIR` is set.
    """
    compiled_cache.watch()
    if folder == "" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", folder or str(cache_folder("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompileCounter:
    """Counts XLA compilations in `count`, except those in `planned` blocks."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and not getattr(_here, "planned", False):
            self.count += 1


@contextmanager
def planned() -> Iterator[None]:
    """Do not count this thread's compilations in the block: they are ahead of time, no request waits for them."""
    before, _here.planned = getattr(_here, "planned", False), True
    try:
        yield
    finally:
        _here.planned = before


@lru_cache(maxsize=1)
def compile_counter() -> CompileCounter:
    """The process-wide counter: JAX's listeners are per process and cannot be removed."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter
