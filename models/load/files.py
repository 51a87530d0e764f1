"""Model files: atomic writes, INT8 storage, and weights of a Flax module by name."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.weights import Weights


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it takes the place of `path` if the block ends without an error.

    A process that reads `path` meanwhile sees the old file or the new one, whole. The file gets the mode that the umask
    gives new files, whatever wrote it. Raises `OSError`.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    # Created as any file is, so that the system applies the umask: to ask for the umask is to set it, for all threads.
    handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        mode = os.fstat(handle).st_mode & 0o777
        os.close(handle)
        yield new
        os.chmod(new, mode)  # safetensors puts a file of its owner's alone in its place
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def quantized(name: str, matrix: np.ndarray, rows: bool = False) -> Weights:
    """`matrix [a, b]` as `name` int8 and `name.scale` float32, a column's `[b]`, or with `rows` a row's `[a, 1]`."""
    largest = np.abs(matrix).max(1, keepdims=True) if rows else np.abs(matrix).max(0)
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / 127  # zeros stay zeros
    return {name: np.rint(matrix / scale).astype(np.int8), f"{name}.scale": scale.astype(np.float32)}


def restored(stored: Weights) -> Weights:
    """What `quantized` took, nearly, as float32; other tensors as they are. Raises `KeyError` naming a scale that is
    missing."""
    small = {name for name, value in stored.items() if value.dtype == np.int8}
    scales = {f"{name}.scale" for name in small}
    whole = {name: value for name, value in stored.items() if name not in scales}
    return {n: v.astype(np.float32) * stored[f"{n}.scale"] if n in small else v for n, v in whole.items()}


Module = TypeVar("Module", bound=nnx.Module)


def weights_of(module: nnx.Module) -> Weights:
    """All parameters, as numpy."""
    return {_name(path): np.asarray(p.get_value()) for path, p in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def shapes_of(make: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of what `make` makes, without making it."""
    state = nnx.state(nnx.eval_shape(make), nnx.Param)
    return {_name(path): tuple(p.get_value().shape) for path, p in nnx.to_flat_state(state)}


def filled(make: Callable[[], Module], weights: Mapping[str, np.ndarray], where: str) -> Module:
    """What `make` makes with `weights` in place of its own, as float32.

    Raises `ModelLoadError` naming a weight that is missing, of another shape or not expected; `where` begins it.
    """
    graph, state = nnx.split(nnx.eval_shape(make), nnx.Param)
    flat = {_name(path): (path, p) for path, p in nnx.to_flat_state(state)}
    for name in (*flat.keys() - weights.keys(), *weights.keys() - flat.keys()):
        raise ModelLoadError(f"{where}: weight {name} is {'missing' if name in flat else 'not expected'}")
    for name, (_, p) in flat.items():
        if weights[name].shape != (shape := tuple(p.get_value().shape)):
            raise ModelLoadError(f"{where}: weight {name} has shape {list(weights[name].shape)}, not {list(shape)}")
    new = [(path, p.replace(jnp.asarray(weights[name], jnp.float32))) for name, (path, p) in flat.items()]
    return nnx.merge(graph, nnx.from_flat_state(new))


def _name(path: tuple[object, ...]) -> str:
    return ".".join(str(part) for part in path)
