"""KV cache management: pages of requests, and what happens when pages run out (`memory`)."""

from __future__ import annotations

from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.defer import Defer
from jaxspec.sched.kv.manager import KVCacheManager
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.kv.swap import Swap

__all__ = ["Defer", "KVCacheManager", "Swap", "build"]


def build(config: SchedulerConfig, pool: PagePool) -> KVCacheManager:
    """The KV cache manager for `policy.memory`. Without host pages, auto and swap recompute."""
    match config.policy.memory:
        case "defer":
            return Defer(pool)
        case "auto" | "swap" if config.host_pages:
            costs = config.costs if config.policy.memory == "auto" else None
            return Swap(pool, config.host_pages, config.exact_swap, costs)
        case _:
            return KVCacheManager(pool)
