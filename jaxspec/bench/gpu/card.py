"""The device under measurement: its weights, runners and random KV, and how times are taken on it."""

from __future__ import annotations

import gc
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu import costs
from jaxspec.bench.gpu.models import MODELS, random_weights
from jaxspec.bench.gpu.plan import Sizes
from jaxspec.config import EngineConfig
from jaxspec.models.config import DecoderConfig
from jaxspec.step.kv_cache import page_bytes
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.runner import ModelRunner
from jaxspec.step.xla import XlaLayers

if TYPE_CHECKING:
    from jaxspec.step.layers import Layers

#: Device memory that is left to a step's temporary arrays.
_SPARE = 2 << 30


class Skipped(Exception):
    """A measurement that this device cannot make; the message says why."""


@dataclass
class Card:
    """What the measurements share. `interpret`: run the attention kernel in Pallas's interpreter, on the CPU."""

    model: str
    sizes: Sizes
    interpret: bool = False
    cache: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._weights: dict[str, dict[str, jax.Array]] = {}

    @property
    def config(self) -> DecoderConfig:
        return MODELS[self.model]

    @property
    def dtype(self) -> str:
        """The dtype whose speed is measured."""
        return "bfloat16"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def memory(self) -> int | None:
        """Bytes of device memory that JAX may use; None if it does not say."""
        return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")

    def weights(self, model: str) -> dict[str, jax.Array]:
        """Random weights, made once and kept."""
        if model not in self._weights:
            self._weights[model] = random_weights(MODELS[model], self.seed)
            jax.block_until_ready(self._weights[model])
        return self._weights[model]

    def release(self) -> None:
        """Free the memory of the last measurement: runners are in reference cycles."""
        gc.collect()

    def layers(self, kernel: bool = True) -> Layers:
        """The layers with the attention kernel, or with XLA's attention."""
        if not kernel:
            return XlaLayers()
        from jaxspec.step.gpu import GpuLayers

        return GpuLayers(self.interpret)

    def runner(
        self, model: str, buckets: tuple[int, ...], seqs: int, context: int, dtype: str, kernel: bool = True,
        one_graph: bool = True,
    ) -> ModelRunner:  # fmt: skip
        """A runner for `seqs` requests of `context` positions, in steps of these sizes. Raises `Skipped`."""
        config, shape = self.engine_config(buckets, seqs, context, dtype), MODELS[model]
        pages = seqs * -(-context // config.page_size)
        pool = pages * page_bytes(shape, config.page_size, dtype)
        needed = pool + costs.weight_bytes(shape, jnp.dtype(dtype).itemsize) + _SPARE
        if self.memory is not None and needed > self.memory:
            raise Skipped(f"needs {needed / 1e9:.0f} GB of device memory; JAX may use {self.memory / 1e9:.0f} GB")
        weights = cast("dict[str, np.ndarray]", self.weights(model))  # JAX's arrays are taken as they are
        return ModelRunner(config, shape, weights, pages, layers=self.layers(kernel), one_graph=one_graph)

    def engine_config(self, buckets: tuple[int, ...], seqs: int, context: int, dtype: str, **more: Any) -> EngineConfig:
        return EngineConfig.model_validate({
            "draft": [], "dtype": dtype, "max_num_seqs": seqs, "max_num_batched_tokens": max(buckets),
            "token_buckets": list(buckets), "max_model_len": context, "compilation_cache_dir": self.cache,
        } | more)  # fmt: skip

    def fill(self, cache: AnyKVCache) -> AnyKVCache:
        """The KV cache with random keys and values. Zeros would take less power, and so let the clock run faster."""
        key = jax.random.key(self.seed)
        for name, number in (("keys", 1), ("values", 2)):
            pool = getattr(cache, name)
            for layer in range(pool.shape[0]):
                pool = _fill(pool, layer, jax.random.fold_in(jax.random.fold_in(key, number), layer))
            cache = cache._replace(**{name: pool})
        return cache


@partial(jax.jit, donate_argnums=0)
def _fill(pool: jax.Array, layer: int, key: jax.Array) -> jax.Array:
    return pool.at[layer].set(jax.random.normal(key, pool.shape[1:], pool.dtype))


def chained(run: Callable[[], Any], wait: Callable[[Any], Any], steps: int, repeats: int) -> dict[str, list[float]]:
    """Run `steps` times in a row and wait for the last, `repeats` times. One repetition before is not counted.

    -> milliseconds per run: `device_ms` until the end, `dispatch_ms` until the host was free. If they are equal, the
    host was the slower one, or waits for the device in every launch.
    """
    out: dict[str, list[float]] = {"device_ms": [], "dispatch_ms": []}
    for i in range(repeats + 1):
        begun, last = time.perf_counter(), None
        for _ in range(steps):
            last = run()
        dispatched = time.perf_counter()
        wait(last)
        if i:
            out["device_ms"].append(1e3 * (time.perf_counter() - begun) / steps)
            out["dispatch_ms"].append(1e3 * (dispatched - begun) / steps)
    return out


def setting() -> dict[str, Any]:
    """The device and the software that the numbers depend on."""
    first = jax.devices()[0]
    return {"device": first.device_kind, "backend": jax.default_backend(), "jax": jax.__version__, **_driver()}


def _driver() -> Mapping[str, str]:
    """Driver and power limit, if nvidia-smi is there."""
    if jax.default_backend() != "gpu" or shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    driver, _, power = shown.splitlines()[0].partition(", ")
    return {"driver": driver, "power": power}
