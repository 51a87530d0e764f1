"""The weights of a Flax module by name, and back: `layers.0.qkv.kernel` is `module.layers[0].qkv.kernel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.load.errors import ModelLoadError
from jaxspec.models.load.weights import Weights

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
