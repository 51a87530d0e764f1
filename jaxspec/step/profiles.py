"""Measured times, kept from one start to the next: the same programs on the same device take the same time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxspec.cache import cache_folder
from jaxspec.kernels.build import sources
from jaxspec.models.load.atomic import replacing

log = logging.getLogger(__name__)

#: For how many seconds.
KEPT = 7 * 24 * 3600
#: Seconds by the name of a program.
Profile = dict[str, float]


def remembered(key: Any, names: list[str], measure: Callable[[], Profile], folder: Path | None = None) -> Profile:
    """What `measure` gave when it was last called for this device and `key` (whatever its `repr` tells apart).

    Kept in `folder`, by default `profiles` in the cache, for a week: the machine may have been busy. A file that is not
    of `names` is replaced, and one that cannot be written is done without.
    """
    digest = hashlib.sha256(repr((key, names, device(), jax.__version__)).encode())
    for source in sources():
        digest.update(source.read_bytes())
    path = (folder or cache_folder("profiles")) / f"{digest.hexdigest()[:16]}.json"
    try:
        old = time.time() - path.stat().st_mtime > KEPT
        found = {} if old else json.loads(path.read_text())
        if list(found) == names and all(isinstance(v, float) and v > 0 for v in found.values()):
            return found
    except (OSError, ValueError, TypeError):
        pass
    profile = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:  # another process may be looking
            file.write_text(json.dumps(profile))
    except OSError as error:
        log.warning("the measured times are not kept: %s", error)
    return profile


def median_seconds(run: Callable[[], None], repeats: int = 5) -> float:
    """What `run` takes."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[repeats // 2]


def device() -> str:
    """What the programs run on: the accelerator's kind, or the CPU's name and how much of it we may use."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return first.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [os.environ.get(limit, "") for limit in ("JAXSPEC_THREADS", "XLA_FLAGS")]
    return f"{name or platform.processor() or platform.machine()} × {cores} {' '.join(limits)}".rstrip()
