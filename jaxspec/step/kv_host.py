"""The host pool: KV pages out of the device's memory and back (ALISE §3.2).

A page's rows of all pools, the target's and the drafters', travel together as a few arrays. A program copies them out
of the pools, in the order of the device's other work; from there to the host they go beside the next steps. On GPU the
host's side is pinned memory; on CPU device memory is the host's already, and the copy is all there is to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxspec.config import EngineConfig
from jaxspec.sched.plan import Plan
from jaxspec.sched.timing import SwapCosts, between
from jaxspec.step.kv_cache import POSITIONS
from jaxspec.step.kv_int8 import AnyKVCache
from jaxspec.step.profiles import NOT_KEPT, ProfileStore
from jaxspec.step.quantization import Quantized, dequantize, quantize
from jaxspec.step.runner import ModelRunner
from jaxspec.step.warmup import CompileJob, WarmUp

log = logging.getLogger(__name__)

#: Pages that are moved by one call, descending; the last is 1.
GROUPS: tuple[int, ...] = (4, 1)
#: Requests in a step whose time stands for that of decoding.
USUAL = 8
#: Largest share of the free memory that the host pool may take, whatever was asked for.
SHARE = 0.5
#: Share by which moving pages ahead of need may make a step slower, where that takes time from it.
SLOWER = 0.1

#: A page's rows of all pools.
Rows = tuple[jax.Array, ...]
Pools = tuple[AnyKVCache, ...]


def host_pool(
    config: EngineConfig, model_runner: ModelRunner, drafters: Sequence[Owner], warm_up: WarmUp, store: ProfileStore
) -> HostKVCache:
    """The host pool that the settings ask for; of no pages where the policy never swaps."""
    space = config.swap_space * 2**30 if config.memory in ("auto", "swap") else 0.0
    pool = HostKVCache([model_runner, *drafters], space, warm_up, config.swap_dtype == "int8", store)
    if config.memory == "swap" and not pool.num_pages:
        log.warning("no page fits the host's memory: what has to leave the device is computed anew")
    return pool


def swap_costs(config: EngineConfig, model_runner: ModelRunner, pool: HostKVCache) -> SwapCosts | None:
    """What moving and computing take here, where anything depends on it."""
    if not pool.num_pages and config.order != "alise":
        return None
    out, back = pool.seconds
    steps = {int(size): seconds for size, seconds in model_runner.profile.seconds.items()}
    largest = max(steps)
    return SwapCosts(out, back, steps[largest] / largest, between(steps, min(USUAL, config.max_num_seqs)))


def swap_pages(pool: HostKVCache, costs: SwapCosts | None) -> int | None:
    """How many may move beside a step, see `SchedulerConfig.swap_pages`."""
    return None if pool.overlaps or costs is None else costs.beside(SLOWER)


class Owner(Protocol):
    """Whose steps use a pool, and donate it: it is another after each."""

    pool: Any  # Pool or Int8KVCache

    def overwritten(self, pages: Sequence[int]) -> None:
        """Is told which pages uploads write."""
        ...


class HostKVCache:
    """Holds up to `num_pages` pages, each as it was offloaded. All programs are compiled in `__init__`.

    Transfers are started and not waited for; they and the steps come in the order of the calls. Not thread-safe: one
    thread, the engine's loop, calls it. `space`: bytes that may be taken. `quantized`: kept as INT8
    by channels (`jaxspec.step.kv_int8`), so that what comes back is no longer exact.
    """

    def __init__(
        self, owners: Sequence[Owner], space: float, warm_up: WarmUp, quantized: bool = False,
        store: ProfileStore = NOT_KEPT,
    ):  # fmt: skip
        self._owners, self.quantized = list(owners), quantized
        device = next(iter(owners[0].pool.keys.devices()))
        kinds = {memory.kind for memory in device.addressable_memories()}
        #: Whether pages move without the device's help. On a CPU they take time from the step that runs beside.
        self.overlaps = device.platform != "cpu"
        pinned = device.platform != "cpu" and "pinned_host" in kinds
        self._near = SingleDeviceSharding(device)
        self._far = SingleDeviceSharding(device, memory_kind="pinned_host") if pinned else self._near
        page = jax.eval_shape(partial(_take, quantized), self._pools, jax.ShapeDtypeStruct((1,), jnp.int32))[0]
        self._page: tuple[jax.ShapeDtypeStruct, ...] = page
        #: Bytes of a page on the host.
        self.page_bytes = sum(x.size * x.dtype.itemsize for x in page)
        # The pools' own memory may be promised and not taken yet.
        promised = sum(x.nbytes for x in jax.tree.leaves(self._pools)) if device.platform == "cpu" else 0
        free = max(0, psutil.virtual_memory().available - promised)
        self.num_pages = int(min(space, SHARE * free) // self.page_bytes)
        self._kept: list[Rows | None] = [None] * self.num_pages
        self._landing: list[tuple[tuple[int, ...], tuple[Rows, ...]]] = []
        #: Seconds to move a page out, and in.
        self.seconds = 0.0, 0.0
        #: Pages moved so far, out and in.
        self.offloaded = self.uploaded = 0
        if not self.num_pages:
            return
        self._take: dict[int, Any] = {}
        self._put: dict[int, Any] = {}
        jobs = [
            CompileJob(f"offload of {n}", partial(self._compile_take, n), partial(self._take.__setitem__, n))
            for n in GROUPS
        ]
        jobs += [
            CompileJob(f"upload of {n}", partial(self._compile_put, n), partial(self._put.__setitem__, n))
            for n in GROUPS
        ]
        warm_up.compile_now("compiling the host pool", jobs)
        self._warm_up()
        self._measure(store)

    @property
    def _pools(self) -> Pools:
        return tuple(owner.pool for owner in self._owners)

    @_pools.setter
    def _pools(self, pools: Pools) -> None:
        for owner, pool in zip(self._owners, pools, strict=True):
            owner.pool = pool

    def _compile_take(self, size: int) -> Any:
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        return jax.jit(partial(_take, self.quantized)).lower(self._pools, ids).compile()

    def _compile_put(self, size: int) -> Any:
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
        rows = tuple(self._page for _ in range(size))
        return jax.jit(partial(_put, self.quantized), donate_argnums=0).lower(self._pools, ids, rows).compile()

    def _warm_up(self) -> None:
        """Move each group out and back to where it came from: the content of the pools stays as it is."""
        for size in GROUPS:
            ids = self._some(size)
            self._bring(ids, self._fetch(ids))
            jax.block_until_ready(self._pools)

    def _some(self, size: int) -> np.ndarray:
        """Pages to try a group with; there may be fewer than it moves."""
        return np.arange(size, dtype=np.int32) % self._owners[0].pool.keys.shape[1]

    def _fetch(self, ids: np.ndarray) -> tuple[Rows, ...]:
        return jax.device_put(self._take[len(ids)](self._pools, ids), self._far)

    def _bring(self, ids: np.ndarray, rows: tuple[Rows, ...]) -> None:
        self._pools = self._put[len(ids)](self._pools, ids, jax.device_put(rows, self._near))

    def _measure(self, store: ProfileStore) -> None:
        """Seconds to move a page out, and in."""
        ids = self._some(GROUPS[0])
        rows = self._fetch(ids)

        def out() -> None:
            jax.block_until_ready(self._fetch(ids))

        def back() -> None:
            self._bring(ids, rows)
            jax.block_until_ready(self._pools)

        key = (GROUPS, [(x.shape, str(x.dtype)) for x in self._page], [p.keys.shape for p in self._pools])
        profile = store.open("swap", key, ["out", "in"])
        profile.offer("out", out)
        profile.offer("in", back)
        found = profile.measure()
        self.seconds = found["out"] / len(ids), found["in"] / len(ids)

    def carry_out(self, plan: Plan) -> None:
        """Start what `plan` moves. Call it for every plan, before its drafts and its step.

        What its step does not read comes in beside it, and is put in its place before the next plan.
        """
        self._land()
        for transfer in plan.offload:
            self.offload(transfer.device, transfer.host)
        if plan.upload:
            read = {page for work in plan.scheduled for page in work.request.pages}
            for transfer in plan.upload:
                self.upload(transfer.host, transfer.device, at_once=not read.isdisjoint(transfer.device))

    def offload(self, pages: Sequence[int], host: Sequence[int]) -> None:
        """Copy device pages, as the calls before leave them, to host pages."""
        self._land()
        for group, keep in zip(_groups(pages), _groups(host), strict=True):
            for page, parts in zip(keep, self._fetch(np.asarray(group, np.int32)), strict=True):
                self._kept[page] = parts
        self.offloaded += len(pages)

    def upload(self, host: Sequence[int], pages: Sequence[int], at_once: bool = True) -> None:
        """Bring host pages back to device pages, and free the host pages. Unless `at_once`, they are in their places
        only when the next call comes. Raises `ValueError` for a host page that holds nothing."""
        for group, kept in zip(_groups(pages), _groups(host), strict=True):
            rows = tuple(self._give(page) for page in kept)
            self._landing.append((group, jax.device_put(rows, self._near)))
        for owner in self._owners:
            owner.overwritten(pages)
        if at_once:
            self._land()
        self.uploaded += len(pages)

    def _give(self, page: int) -> Rows:
        rows, self._kept[page] = self._kept[page], None
        if rows is None:
            raise ValueError(f"host page {page} holds nothing")
        return rows

    def _land(self) -> None:
        for group, rows in self._landing:
            self._pools = self._put[len(group)](self._pools, np.asarray(group, np.int32), rows)
        self._landing.clear()


def _groups(pages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Cut into the sizes that are compiled."""
    start = 0
    for size in GROUPS:
        stop = start + (len(pages) - start) // size * size
        for i in range(start, stop, size):
            yield tuple(pages[i : i + size])
        start = stop


def _take(quantized: bool, pools: Pools, ids: jax.Array) -> tuple[Rows, ...]:
    """The rows of pages `ids [G]`."""
    parts: list[list[jax.Array]] = []
    for pool in pools:
        for name, axis in pool.paged:
            whole = getattr(pool, name)
            rows = [lax.dynamic_index_in_dim(whole, page, axis, keepdims=False) for page in ids]
            if quantized and _is_exact(whole):
                parts += [list(x) for x in quantize(jnp.stack(rows), POSITIONS[name])]
            else:
                parts.append(rows)
    return tuple(zip(*parts, strict=True))


def _put(quantized: bool, pools: Pools, ids: jax.Array, rows: tuple[Rows, ...]) -> Pools:
    """The pools with `rows` in pages `ids [G]`."""
    parts, new = zip(*rows, strict=True), []
    for pool in pools:
        fields = {}
        for name, axis in pool.paged:
            whole, own = getattr(pool, name), next(parts)
            if quantized and _is_exact(whole):
                kept = Quantized(*(jnp.stack(x) for x in (own, next(parts), next(parts))))
                own = dequantize(kept, POSITIONS[name], whole.dtype)
            for page, row in zip(ids, own, strict=True):
                whole = lax.dynamic_update_index_in_dim(whole, row, page, axis)
            fields[name] = whole
        new.append(pool._replace(**fields))
    return tuple(new)


def _is_exact(x: jax.Array) -> bool:
    """Whether it is not INT8 already."""
    return jnp.issubdtype(x.dtype, jnp.floating)
