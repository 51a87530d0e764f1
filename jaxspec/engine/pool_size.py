"""The number of pages of the KV pool, from what the models need and what the devices have."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config import EngineConfig
from jaxspec.draft.registry import Models, allocate_distributions, growths, own_devices
from jaxspec.draft.runner import round_buckets
from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import feature_width
from jaxspec.models.load.parts import weight_shapes
from jaxspec.models.load.weights import of_target
from jaxspec.models.shards import Shards
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.batch import BatchShape
from jaxspec.step.buckets import StepSizes, step_buckets
from jaxspec.step.device_memory import TARGET, DeviceMemory, MemoryUse, pool_pages
from jaxspec.step.kv_cache import feature_bytes, page_bytes, pages_for, stored_as
from jaxspec.step.kv_int8 import most_written
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.runner import pick_layers
from jaxspec.step.temporaries import CORES, Program

log = logging.getLogger(__name__)


def kv_pool_pages(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: str,
    drafters: Models,
    features: bool,
) -> int:
    """Number of pages of the KV pool: on GPUs from the devices' memory, elsewhere from the host's.

    `dtype`: of weights and unquantised KV; `features`: with a feature pool. Raises `ConfigError` if weights or pool do
    not fit.
    """
    devices = jax.devices()
    if devices[0].platform != "gpu":
        return pages_for(config, model, dtype, features)
    own_devices(config, drafters)  # checks `draft_devices`
    uses = memory_uses(config, model, dtype, drafters, features, devices)
    gc.collect()  # engines are in reference cycles: one that was dropped may still hold all memory
    memory = {i: DeviceMemory.of(devices[i], config.gpu_memory_utilization) for i in {use.device for use in uses}}
    known = {i: m for i, m in memory.items() if m is not None}
    if len(known) < len(memory):
        log.warning(
            "%s does not say how much memory it has: the KV pool is sized by the host's memory; set kv_cache_tokens",
            devices[0].device_kind,
        )
        return pages_for(config, model, dtype, features)
    return pool_pages(config, dtype, uses, known, _longest(config, model))


def memory_uses(
    config: EngineConfig,
    model: DecoderConfig,
    dtype: str,
    drafters: Models,
    features: bool,
    devices: Sequence[Any],
) -> list[MemoryUse]:
    """What the target and each draft model take of their devices, of all that share them. See `kv_pool_pages`."""
    size, item = config.page_size, jnp.dtype(dtype).itemsize
    layers = pick_layers(config, model)
    kernel, parallel = layers.name == "gpu", layers.parallel
    # Each device has the same part of everything.
    shards_of = partial(Shards, devices=1) if parallel is None else parallel.shards
    shards = shards_of(model)
    model = shards.local
    drawn = jax.eval_shape(partial(allocate_distributions, config, drafters))
    penalties = jax.eval_shape(partial(PenaltyTable.empty, config.max_num_seqs, model.vocab_size))
    tables = _nbytes(penalties) + _nbytes(drawn)
    if config.kv_cache_dtype == "int8":
        tables += config.max_num_seqs * page_bytes(model, size, dtype)  # open pages
    shapes = _step_shapes(config, model, drawn.logits.shape[2], layers.sizes)
    program = Program(model, dtype, size, kernel, _cores(devices[0]))
    target = MemoryUse(
        TARGET,
        # A tied embedding is copied to the head.
        _elements(shards.local_shapes(weight_shapes(replace(shards.config, tie_embeddings=False)))) * item,
        page_bytes(model, size, stored_as(config, dtype)) + feature_bytes(model, size, dtype) * features,
        max(program.step_bytes(shape) for shape in shapes),
        tables,
    )
    width = max(growth.width for growth in growths(config, drafters))
    chains = round_buckets(shapes[-1].tokens, shapes[-1].trees, shapes[-1].pages)
    uses = [target]
    for name, drafter in drafters.items():
        if drafter is None:
            continue
        whole, own = drafter
        shards = shards_of(whole)
        c = shards.local
        at = config.draft_devices.get(name, 0)
        program = Program(c, dtype, size, kernel, _cores(devices[at]))
        vocab = len(own["vocab"])
        shapes_of = weight_shapes(replace(whole, tie_embeddings=False)) | {"head": (c.hidden_size, vocab)}
        if "mix" in own:
            shapes_of |= {"mix": (feature_width(c), c.hidden_size), "fuse": (2 * c.hidden_size, c.hidden_size)}
        if at == 0:
            shapes_of = {n: shape for n, shape in shapes_of.items() if n not in of_target(own)}
        shapes_of = shards.local_shapes(shapes_of)
        temporaries = max(program.round_bytes(shape, vocab, width, DEPTH) for shape in chains)
        uses.append(MemoryUse(name, _elements(shapes_of) * item, page_bytes(c, size, dtype), temporaries, device=at))
    if parallel is not None:
        uses = [replace(use, device=i) for i in range(parallel.size) for use in uses]
    return uses


def _step_shapes(config: EngineConfig, model: DecoderConfig, children: int, default: StepSizes) -> list[BatchShape]:
    """The shapes of the target's steps, ascending. `children`: see `BatchShape`."""
    written = partial(most_written, page_size=config.page_size) if config.kv_cache_dtype == "int8" else None
    pages = -(-_longest(config, model) // config.page_size)
    sizes = config.token_budget, config.max_num_seqs, pages, config.token_buckets
    return step_buckets(*sizes, children, written, default)


def _longest(config: EngineConfig, model: DecoderConfig) -> int:
    """Maximum tokens of a request."""
    return min(config.max_model_len or model.max_position, model.max_position)


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in arrays of these shapes."""
    return sum(map(prod, shapes.values()))


def _nbytes(arrays: Any) -> int:
    return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _cores(device: Any) -> int:
    """Multiprocessors of a GPU."""
    return getattr(device, "core_count", CORES)
