"""Helpers for model files: JSON, atomic writes, INT8 storage, weights of Flax modules by name."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jaxspec.errors import ModelLoadError
from jaxspec.models.load.weights import Weights


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelLoadError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e  # str(e) would repeat the path
        raise ModelLoadError(f"{path}: not readable as JSON ({reason})") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return value


@contextmanager
def blaming(where: str, what: str) -> Iterator[None]:
    """Raise `ModelLoadError`, `where: what`, instead of whatever else the content of a file makes its reader raise.

    Readers check what people get wrong, and say so. Files that were damaged or made to do harm have values of any kind
    in any place, which no reader checks one by one.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as e:  # a panic of Rust code is no Exception
        panic = type(e).__name__ == "PanicException"
        if not (panic or isinstance(e, Exception)) or isinstance(e, ImportError):
            raise
        raise ModelLoadError(f"{where}: {what} ({type(e).__name__}: {' '.join(str(e).split())[:300]})") from e


def read_tensors(path: Path, what: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and all tensors of a safetensors file. `what`: the kind of file. Raises `ModelLoadError`."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, AttributeError, TypeError) as error:  # numpy lacks some of the format's types
        why = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise ModelLoadError(f"cannot read {what} {path}: {why:.300}") from None


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Atomically replace `path`: yields a temporary file next to it, renamed to `path` if the block succeeds.

    Concurrent readers see the complete old or new file. Its permissions are `mode` less the umask. Raises `OSError`.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    # os.open applies the umask. Reading the umask requires setting it, which would affect other threads.
    handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), mode)
    try:
        allowed = os.fstat(handle).st_mode & 0o777
        os.close(handle)
        yield new
        os.chmod(new, allowed)  # safetensors replaces it with a file of mode 0600
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def quantized(name: str, matrix: np.ndarray, rows: bool = False) -> dict[str, np.ndarray]:
    """INT8 form of `matrix [a, b]`: `name` int8 and `name.scale` float32, per column `[b]` or per row `[a, 1]`."""
    largest = np.abs(matrix).max(1, keepdims=True) if rows else np.abs(matrix).max(0)
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / 127  # zeros stay zeros
    return {name: np.rint(matrix / scale).astype(np.int8), f"{name}.scale": scale.astype(np.float32)}


def restored(stored: Weights) -> Weights:
    """Dequantise INT8 tensors of `quantized` to float32; other tensors stay as they are.

    Raises `KeyError` naming a missing scale.
    """
    small = {name for name, value in stored.items() if value.dtype == np.int8}
    scales = {f"{name}.scale" for name in small}
    whole = {name: value for name, value in stored.items() if name not in scales}
    return {n: v.astype(np.float32) * stored[f"{n}.scale"] if n in small else v for n, v in whole.items()}


Module = TypeVar("Module", bound=nnx.Module)


def weights_of(module: nnx.Module) -> Weights:
    """All parameters as numpy, by dotted name."""
    return {_name(path): np.asarray(p.get_value()) for path, p in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def shapes_of(make: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the module that `make` returns, without allocating it."""
    state = nnx.state(nnx.eval_shape(make), nnx.Param)
    return {_name(path): tuple(p.get_value().shape) for path, p in nnx.to_flat_state(state)}


def filled(make: Callable[[], Module], weights: Mapping[str, np.ndarray], where: str) -> Module:
    """The module that `make` returns, with `weights` as float32 instead of initial values.

    Raises `ModelLoadError`, prefixed with `where`, naming a weight that is missing, unexpected or of another shape.
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
