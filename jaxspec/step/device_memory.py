"""Sizes the KV pool from the GPU's own memory, as vLLM does with the same setting, `gpu_memory_utilization`.

JAX takes a fraction of a GPU when it initialises, 75 % by default. `claim_memory` makes that fraction the setting, if
nothing else has decided it. `pool_pages` then gives the KV pool what weights, tables and programs leave of it. Drafters
share the target's page ids, so every pool has the same number of pages: as many as the fullest device holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.config import ConfigError, EngineConfig

log = logging.getLogger(__name__)

#: The share of a GPU that JAX takes by default.
_JAX_DEFAULT = 0.75
#: Bytes left free on each device: pages on their way to the host, results in flight, the length predictor's batches,
#: gaps between arrays.
RESERVE = 256 * 2**20
#: The pool must hold a request of this many tokens, or of `max_model_len` if that is less.
_SHORTEST = 1024
#: Most pages: the host keeps a few hundred bytes for each.
_MOST_PAGES = 2**20
_GIB = 2**30


def claim_memory(utilization: float) -> None:
    """Let JAX take this fraction of each GPU. Call it before anything initialises JAX's devices.

    Without effect if they are initialised, or if the environment already says how much JAX takes.
    """
    decided = (
        os.environ.get("XLA_CLIENT_MEM_FRACTION"),
        os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
        os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"),
    )
    if not any(decided) and not _initialised():
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(utilization)


def _initialised() -> bool:
    """Whether JAX has initialised its devices. It has no function for that, but then refuses to change their number."""
    number = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes."""

    name: str
    #: All of it, as derived from JAX's limit and the fraction that JAX was told to take.
    total: int
    #: What the engine may use: `gpu_memory_utilization` of the total, or JAX's limit if that is less.
    usable: int
    #: In use before the engine allocates anything.
    in_use: int

    @property
    def available(self) -> int:
        return self.usable - self.in_use

    @classmethod
    def of(cls, device: Any, utilization: float) -> DeviceMemory | None:
        """The memory of a JAX device; None if it does not say."""
        stats = device.memory_stats()
        if not stats or not stats.get("bytes_limit"):
            return None
        limit = int(stats["bytes_limit"])
        total = limit / _fraction()
        # The limit already is a fraction of the card: `claim_memory` made it this one.
        usable = min(limit, round(total * utilization))
        return cls(f"{device.device_kind} ({device.id})", round(total), usable, int(stats.get("bytes_in_use", 0)))


def _fraction() -> float:
    """The fraction of a GPU that JAX takes."""
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(given) if given else _JAX_DEFAULT


@dataclass(frozen=True)
class MemoryUse:
    """What a model takes of its device, in bytes."""

    #: "the model", or the drafter's name.
    name: str
    weights: int
    #: KV, and features if they are kept, of one page.
    page: int
    #: Upper bound of the intermediate arrays of its largest program.
    temporaries: int
    #: Penalty table, draft distributions, open pages of an INT8 pool.
    tables: int = 0
    #: Index into JAX's devices.
    device: int = 0


def pool_pages(
    config: EngineConfig, dtype: str, uses: Sequence[MemoryUse], devices: Mapping[int, DeviceMemory], longest: int
) -> int:
    """Number of pages of the KV pool on GPUs. `dtype`: of the weights; `uses`: the target's first; `longest`: maximum
    tokens of a request.

    Raises `ConfigError` if weights or pool do not fit.
    """
    shares = [_Share(devices[i], [use for use in uses if use.device == i]) for i in {use.device: None for use in uses}]
    for share in shares:
        share.check_weights(dtype)
    if config.kv_cache_tokens is not None:
        pages = max(1, -(-config.kv_cache_tokens // config.page_size))
        for share in shares:
            share.check_pool(pages, config.page_size)
    else:
        pages = min(_MOST_PAGES, *(share.pages for share in shares))
        needed = -(-min(longest, _SHORTEST) // config.page_size)
        if pages < needed:
            fullest = min(shares, key=lambda share: share.pages)
            raise ConfigError(
                f"gpu_memory_utilization: the KV pool would hold {max(0, pages) * config.page_size} tokens, fewer than "
                f"one request of {needed * config.page_size}; {fullest.account(dtype)}. {_remedies(dtype, fullest)}, "
                "or lower max_num_batched_tokens and max_num_seqs, which take memory in each step"
            )
    tokens = pages * config.page_size
    for share in shares:
        log.info(
            "%s; KV pool %s: %d pages, %d tokens",
            share.account(dtype), gib(pages * share.page_bytes), pages, tokens,
        )  # fmt: skip
    if tokens < longest:
        log.info("requests are limited to the %d tokens of the KV pool, not %d", tokens, longest)
    return pages


@dataclass(frozen=True)
class _Share:
    """A device and what it has to hold."""

    memory: DeviceMemory
    uses: Sequence[MemoryUse]

    @property
    def weights(self) -> int:
        return sum(use.weights for use in self.uses)

    @property
    def tables(self) -> int:
        return sum(use.tables for use in self.uses)

    @property
    def temporaries(self) -> int:
        """Twice the largest, as a margin: a program is launched while another runs, and its own may need their own
        place."""
        return 2 * max(use.temporaries for use in self.uses)

    @property
    def page_bytes(self) -> int:
        return sum(use.page for use in self.uses)

    @property
    def pages(self) -> int:
        """Pages that fit; negative if the rest does not."""
        fixed = self.weights + self.tables + self.temporaries + RESERVE
        return (self.memory.available - fixed) // self.page_bytes

    def check_weights(self, dtype: str) -> None:
        if self.weights > self.memory.available:
            raise ConfigError(
                f"gpu_memory_utilization: the weights do not fit: they take {gib(self.weights)} in {dtype} "
                f"({_each(self.uses)}), and {_available(self.memory)}. {_remedies(dtype, self)}"
            )

    def check_pool(self, pages: int, page_size: int) -> None:
        """Only what is certain: the temporaries are an upper bound, so they do not count."""
        pool, left = pages * self.page_bytes, self.memory.available - self.weights - self.tables
        if pool > left:
            raise ConfigError(
                f"kv_cache_tokens: {pages * page_size} tokens take {gib(pool)}, and {gib(left)} are left of "
                f"{self.memory.name}: {_available(self.memory)}, weights take {gib(self.weights)} and tables "
                f"{gib(self.tables)}"
            )

    def account(self, dtype: str) -> str:
        """Where the memory goes, without the pool."""
        drafters = "".join(f", {use.name} {gib(use.weights)}" for use in self.uses if use.name != TARGET)
        target = sum(use.weights for use in self.uses if use.name == TARGET)
        return (
            f"{self.memory.name}: {_available(self.memory)}; weights ({dtype}) {gib(target)}{drafters}, "
            f"tables {gib(self.tables)}, temporaries at most {gib(self.temporaries)}, reserve {gib(RESERVE)}"
        )


#: Name of the target's `MemoryUse`.
TARGET = "the model"


def gib(size: int) -> str:
    """A size in bytes as text."""
    return f"{size / _GIB:.2f} GiB"


def _each(uses: Sequence[MemoryUse]) -> str:
    return ", ".join(f"{use.name} {gib(use.weights)}" for use in uses)


def _available(memory: DeviceMemory) -> str:
    used = f", {gib(memory.in_use)} of that in use" if memory.in_use else ""
    return f"{gib(memory.usable)} of {gib(memory.total)} may be used{used}"


def _remedies(dtype: str, share: _Share) -> str:
    smaller = ["dtype: bfloat16"] if dtype == "float32" else []
    without = ["fewer drafters (draft)"] if any(use.name != TARGET for use in share.uses) else []
    return f"Set a higher gpu_memory_utilization, {', '.join([*smaller, *without, 'or choose a smaller model'])}"
