"""The length probe on the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.compilation import compile_ahead
from jaxspec.models.length_probe import LengthProbe, median_left
from jaxspec.sched.request import Request
from jaxspec.step.runner import ModelRunner
from jaxspec.step.step import split
from jaxspec.step.tensor_parallel import copied


class ProbeRunner:
    """Runs a length probe on the target's feature pool, for at most `rows` requests at once."""

    def __init__(self, probe: LengthProbe, model_runner: ModelRunner, rows: int, page_size: int) -> None:
        self._model_runner, self._rows, self._page_size = model_runner, rows, page_size
        graph, treedef, leaves = split(probe)
        self._leaves = copied(model_runner.layers.parallel, leaves)

        def run(leaves: tuple[jax.Array, ...], features: jax.Array, slots: jax.Array) -> jax.Array:
            probe = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            found = features.reshape(-1, features.shape[-1]).at[slots].get(mode="fill", fill_value=0)
            return median_left(probe(found))

        self._run = compile_ahead(
            run, self._leaves, model_runner.features, jax.ShapeDtypeStruct((rows,), jnp.int32)
        )  # fmt: skip

    def left_of(self, requests: Sequence[Request]) -> list[float]:
        """Median of the tokens that each request still has to generate. They must have committed positions."""
        padded = np.full(self._rows, np.iinfo(np.int32).max, np.int32)
        padded[: len(requests)] = [self._slot(r) for r in requests]
        return np.asarray(self._run(self._leaves, self._model_runner.features, padded))[: len(requests)].tolist()

    def _slot(self, request: Request) -> int:
        """The slot of its last committed position."""
        page, offset = divmod(request.computed - 1, self._page_size)
        return request.pages[page] * self._page_size + offset
