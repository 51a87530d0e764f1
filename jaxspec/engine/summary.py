"""What an engine runs with, in a few lines: printed when a server is ready."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import jax

from jaxspec.draft.registry import runners
from jaxspec.models.load.parts import weight_shapes
from jaxspec.step.device_memory import gib

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine


def summary(engine: Engine, preset: str | None = None) -> list[tuple[str, str]]:
    """(subject, value) of the model, its KV cache, drafters, length predictor and policies. `preset`: the file that
    the settings come from."""
    config, runner, pool = engine.config, engine.loop.model_runner, engine.loop.scheduler.pool
    parameters = sum(map(prod, weight_shapes(engine.model_config).values()))
    where = {"cpu": "CPU", "gpu": "GPU"}.get(jax.default_backend(), jax.default_backend())
    devices = f", {where}" if runner.layers.parallel is None else f", {runner.layers.parallel.size} devices ({where})"
    kv = runner.kv_cache.keys.nbytes + runner.kv_cache.values.nbytes
    pools = kv + sum(r.kv_cache.keys.nbytes + r.kv_cache.values.nbytes for r in runners(engine.speculator))
    drafters = ", ".join(drafter.name for drafter in engine.speculator.drafters)
    return [
        ("model", f"{engine.model_name}, {parameters / 1e6:,.0f} million parameters, {config.dtype}, "
                  f"{runner.layers.name} kernels{devices}; requests of up to {engine.max_model_len:,} tokens"),
        ("KV cache", f"{pool.num_pages * pool.page_size:,} tokens in {pool.num_pages:,} pages, {gib(pools)} with that "
                     f"of drafters; if it is full: {config.memory}"),
        ("drafters", f"{drafters or 'none'}" + (f"; tree: {config.tree}" if drafters else "")),
        ("length predictor", engine.loop.predictions.name or "none"),
        ("preset", f"{preset or 'none'}; order: {config.order}, batching: {config.batching}, pace: {config.pace}, "
                   f"at most {config.max_num_seqs} requests at once"),
    ]  # fmt: skip
