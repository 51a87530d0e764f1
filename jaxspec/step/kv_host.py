"""KV cache in host memory: pages are offloaded from the device and uploaded again (ALISE §3.2).

A page's rows of all pools (the target's and the drafters') move together as a few arrays. A program copies them out of
the pools, ordered with the device's other work. The transfer to the host then overlaps with the next steps. On GPU the
host memory is pinned. On CPU, device memory is host memory, so the copy out of the pool is the whole transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxspec.compilation import compile_ahead
from jaxspec.config import EngineConfig
from jaxspec.sched.plan import Plan
from jaxspec.sched.slots import MEMORIES, ORDERS, PACES, Need
from jaxspec.sched.timing import SwapCosts, between
from jaxspec.step.kv_cache import POSITIONS
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.profiles import NOT_KEPT, ProfileStore
from jaxspec.step.quantization import Quantized, dequantize, quantize
from jaxspec.step.runner import ModelRunner
from jaxspec.step.tensor_parallel import TensorParallel
from jaxspec.step.warmup import CompileJob, WarmUp

log = logging.getLogger(__name__)

#: Pages moved per call, descending; the last is 1.
GROUPS: tuple[int, ...] = (4, 1)
#: Requests in the step whose time represents a decoding step.
USUAL = 8
#: Maximum fraction of free memory for the host KV cache, whatever `swap_space` is.
SHARE = 0.5
#: Maximum fraction by which moving pages ahead of need may slow down a step, if transfers do not overlap with it.
SLOWER = 0.1

#: A page's rows of all pools.
Rows = tuple[jax.Array, ...]
Pools = tuple[AnyKVCache, ...]


def host_kv_cache(
    config: EngineConfig, model_runner: ModelRunner, drafters: Sequence[Owner], warm_up: WarmUp, store: ProfileStore
) -> HostKVCache:
    """Build the host KV cache for `config`; it has no pages if the memory policy never swaps."""
    space = config.swap_space * 2**30 if MEMORIES.selected(config).can_swap else 0.0
    kv_cache = HostKVCache(
        [model_runner, *drafters], space, warm_up, config.swap_dtype == "int8", store, model_runner.layers.parallel
    )
    if Need.HOST_MEMORY in MEMORIES.selected(config).needs and not kv_cache.num_pages:
        log.warning("no page fits in host memory: preempted requests are recomputed")
    return kv_cache


def swap_costs(config: EngineConfig, model_runner: ModelRunner, host: HostKVCache) -> SwapCosts | None:
    """Measured costs of swapping and recomputing, or None if no policy uses them."""
    if not host.num_pages and not any(Need.RUNTIME in slot.selected(config).needs for slot in (ORDERS, PACES)):
        return None
    out, back = host.seconds
    steps = model_runner.step_seconds
    largest = max(steps)
    return SwapCosts(out, back, steps[largest] / largest, between(steps, min(USUAL, config.max_num_seqs)))


def swap_pages(host: HostKVCache, costs: SwapCosts | None) -> int | None:
    """Maximum pages to move per step; None: no limit. See `SchedulerConfig.swap_pages`."""
    return None if host.overlaps or costs is None else costs.pages_within(SLOWER)


class Owner(Protocol):
    """Owner of a KV cache. Each of its steps donates `kv_cache` and replaces it."""

    kv_cache: Any  # AnyKVCache

    def overwritten(self, pages: Sequence[int]) -> None:
        """Report pages that uploads write."""
        ...


class HostKVCache:
    """Holds up to `num_pages` pages in host memory. All programs are compiled in `__init__`.

    Transfers are asynchronous, but ordered with each other and with steps. Not thread-safe: only the engine's thread
    may call it. `space`: maximum bytes. `quantized`: store pages as INT8 (`jaxspec.step.quantization`), which is lossy.
    """

    def __init__(
        self, owners: Sequence[Owner], space: float, warm_up: WarmUp, quantized: bool = False,
        store: ProfileStore = NOT_KEPT, parallel: TensorParallel | None = None,
    ):  # fmt: skip
        self._owners, self.quantized = list(owners), quantized
        device = next(iter(owners[0].kv_cache.keys.devices()))
        kinds = {memory.kind for memory in device.addressable_memories()}
        #: Whether transfers overlap with steps. On CPU they slow down the step that runs at the same time.
        self.overlaps = device.platform != "cpu"
        pinned = device.platform != "cpu" and "pinned_host" in kinds
        page = jax.eval_shape(partial(_take, quantized), self._kv_caches, jax.ShapeDtypeStruct((1,), jnp.int32))[0]
        #: Where each array of a page is on the device, or devices, and in host memory.
        self._near = self._far = tuple(_sharding(x, device, parallel) for x in page)
        if pinned:
            self._far = tuple(_sharding(x, device, parallel, "pinned_host") for x in page)
        self._page = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=near if parallel else None)
            for x, near in zip(page, self._near, strict=True)
        )
        #: Bytes per page on the host.
        self.page_bytes = sum(x.size * x.dtype.itemsize for x in page)
        # The pools' memory may be allocated, but not touched yet.
        untouched = sum(x.nbytes for x in jax.tree.leaves(self._kv_caches)) if device.platform == "cpu" else 0
        free = max(0, psutil.virtual_memory().available - untouched)
        self.num_pages = int(min(space, SHARE * free) // self.page_bytes)
        self._kept: list[Rows | None] = [None] * self.num_pages
        self._uploading: list[tuple[tuple[int, ...], tuple[Rows, ...]]] = []
        #: Seconds to offload and to upload a page.
        self.seconds = 0.0, 0.0
        #: Number of pages moved so far.
        self.offloaded = self.uploaded = 0
        if not self.num_pages:
            return
        self._programs: dict[tuple[str, int], jax.stages.Compiled] = {}
        jobs = [
            CompileJob(f"{key[0]} of {key[1]}", partial(self._compile, *key), partial(self._programs.__setitem__, key))
            for key in product(("offload", "upload"), GROUPS)
        ]
        warm_up.compile_now("compiling swap programs", jobs)
        self._warm_up()
        self._measure(store)

    def clear(self) -> None:
        """Forget all pages, and uploads that have not been written."""
        self._kept = [None] * self.num_pages
        self._uploading.clear()

    @property
    def _kv_caches(self) -> Pools:
        return tuple(owner.kv_cache for owner in self._owners)

    @_kv_caches.setter
    def _kv_caches(self, kv_caches: Pools) -> None:
        for owner, kv_cache in zip(self._owners, kv_caches, strict=True):
            owner.kv_cache = kv_cache

    def _compile(self, which: str, size: int) -> jax.stages.Compiled:
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        if which == "offload":
            return compile_ahead(partial(_take, self.quantized), self._kv_caches, ids)
        return compile_ahead(partial(_put, self.quantized), self._kv_caches, ids, (self._page,) * size, donate=0)

    def _warm_up(self) -> None:
        """Run each program once: move pages out and back to where they came from. The pools do not change."""
        for size in GROUPS:
            ids = self._sample_ids(size)
            self._store(ids, self._fetch(ids))
            jax.block_until_ready(self._kv_caches)

    def _sample_ids(self, size: int) -> np.ndarray:
        """Page ids for a trial run; ids repeat if the pool has fewer pages."""
        return np.arange(size, dtype=np.int32) % self._owners[0].kv_cache.keys.shape[1]

    def _fetch(self, ids: np.ndarray) -> tuple[Rows, ...]:
        return self._move(self._programs["offload", len(ids)](self._kv_caches, ids), self._far)

    def _store(self, ids: np.ndarray, rows: tuple[Rows, ...]) -> None:
        self._kv_caches = self._programs["upload", len(ids)](self._kv_caches, ids, self._move(rows, self._near))

    @staticmethod
    def _move(rows: tuple[Rows, ...], to: tuple[Sharding, ...]) -> tuple[Rows, ...]:
        return jax.device_put(rows, (to,) * len(rows))

    def _measure(self, store: ProfileStore) -> None:
        """Measure the seconds per page."""
        ids = self._sample_ids(GROUPS[0])
        rows = self._fetch(ids)

        def out() -> None:
            jax.block_until_ready(self._fetch(ids))

        def back() -> None:
            self._store(ids, rows)
            jax.block_until_ready(self._kv_caches)

        key = (GROUPS, [(x.shape, str(x.dtype)) for x in self._page], [p.keys.shape for p in self._kv_caches])
        profile = store.open("swap", key, ["out", "in"])
        profile.offer("out", out)
        profile.offer("in", back)
        found = profile.measure()
        self.seconds = found["out"] / len(ids), found["in"] / len(ids)

    def carry_out(self, plan: Plan) -> None:
        """Start the transfers of `plan`. Call it for every plan, before drafting and before the step.

        Uploads that the step does not read overlap with it and are written to the pools before the next plan.
        """
        self._finish_uploads()
        for transfer in plan.offload:
            self.offload(transfer.device, transfer.host)
        if plan.upload:
            read = {page for s in plan.scheduled for page in s.request.pages}
            for transfer in plan.upload:
                self.upload(transfer.host, transfer.device, at_once=not read.isdisjoint(transfer.device))

    def offload(self, pages: Sequence[int], host: Sequence[int]) -> None:
        """Copy device pages to host pages, after all earlier calls and steps."""
        self._finish_uploads()
        for group, keep in zip(_groups(pages), _groups(host), strict=True):
            for page, parts in zip(keep, self._fetch(np.asarray(group, np.int32)), strict=True):
                self._kept[page] = parts
        self.offloaded += len(pages)

    def upload(self, host: Sequence[int], pages: Sequence[int], at_once: bool = True) -> None:
        """Copy host pages to device pages and free the host pages.

        Unless `at_once`, the pools are written at the next call only. Raises `ValueError` if a host page is empty.
        """
        for group, kept in zip(_groups(pages), _groups(host), strict=True):
            rows = tuple(self._take_rows(page) for page in kept)
            self._uploading.append((group, self._move(rows, self._near)))
        for owner in self._owners:
            owner.overwritten(pages)
        if at_once:
            self._finish_uploads()
        self.uploaded += len(pages)

    def _take_rows(self, page: int) -> Rows:
        rows, self._kept[page] = self._kept[page], None
        if rows is None:
            raise ValueError(f"host page {page} is empty")
        return rows

    def _finish_uploads(self) -> None:
        for group, rows in self._uploading:
            self._kv_caches = self._programs["upload", len(group)](self._kv_caches, np.asarray(group, np.int32), rows)
        self._uploading.clear()


def _sharding(
    row: jax.ShapeDtypeStruct, device: Any, parallel: TensorParallel | None, memory: str | None = None
) -> Sharding:
    if parallel is not None:
        return parallel.rows_sharding(len(row.shape), memory)
    return SingleDeviceSharding(device, memory_kind=memory)


def _groups(pages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Split into groups of compiled sizes."""
    start = 0
    for size in GROUPS:
        stop = start + (len(pages) - start) // size * size
        for i in range(start, stop, size):
            yield tuple(pages[i : i + size])
        start = stop


def _take(quantized: bool, kv_caches: Pools, ids: jax.Array) -> tuple[Rows, ...]:
    """Copy the rows of pages `ids [G]` out of the pools. Traced."""
    parts: list[list[jax.Array]] = []
    for kv_cache in kv_caches:
        for name, axis in kv_cache.paged:
            whole = getattr(kv_cache, name)
            rows = [lax.dynamic_index_in_dim(whole, page, axis, keepdims=False) for page in ids]
            if quantized and _unquantised(whole):
                parts += [list(x) for x in quantize(jnp.stack(rows), POSITIONS[name])]
            else:
                parts.append(rows)
    return tuple(zip(*parts, strict=True))


def _put(quantized: bool, kv_caches: Pools, ids: jax.Array, rows: tuple[Rows, ...]) -> Pools:
    """Write `rows` to pages `ids [G]` of the pools. Traced."""
    parts, new = zip(*rows, strict=True), []
    for kv_cache in kv_caches:
        fields = {}
        for name, axis in kv_cache.paged:
            whole, pages = getattr(kv_cache, name), next(parts)
            if quantized and _unquantised(whole):
                kept = Quantized(*(jnp.stack(x) for x in (pages, next(parts), next(parts))))
                pages = dequantize(kept, POSITIONS[name], whole.dtype)
            for page, row in zip(ids, pages, strict=True):
                whole = lax.dynamic_update_index_in_dim(whole, row, page, axis)
            fields[name] = whole
        new.append(kv_cache._replace(**fields))
    return tuple(new)


def _unquantised(x: jax.Array) -> bool:
    """Whether the array is not INT8 already."""
    return jnp.issubdtype(x.dtype, jnp.floating)
