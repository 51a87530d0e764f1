"""CPU kernels built for several instruction sets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.kernels import cpu

#: Kernels whose tiles are emulated.
TILES = f"cc -march=x86-64-v4 -mavx512bf16 -mavx512vnni -include {Path(__file__).parent / 'tiles.h'}"
_V4 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
#: Compilers and the features of the CPU that their kernels need, by name. Registers hold 16, 8 and 4 floats.
BUILDS = {
    "native": ("", set[str]()),
    "v4": ("cc -march=x86-64-v4", _V4),
    "v3": ("cc -march=x86-64-v3", {"avx2", "fma", "f16c"}),
    "sse": ("cc -march=x86-64", {"sse2"}),
    "tiles": (TILES, _V4 | {"avx512_bf16", "avx512_vnni"}),
}


def use(name: str) -> Iterator[str]:
    """For a fixture: kernels of `BUILDS[name]`, or a skip. Yields the compiler's command."""
    command, needed = BUILDS[name]
    if command and (not shutil.which("cc") or not needed <= features()):
        pytest.skip(f"no C compiler or CPU for {name}")
    cpu.load(command)
    with cpu.built_by(command):
        yield command


def features() -> set[str]:
    """Flags of this CPU, on Linux."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:  # not Linux
        return set()
