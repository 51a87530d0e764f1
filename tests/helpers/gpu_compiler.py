"""Compiles the engine's programs for NVIDIA GPUs on a machine that has none, and reads what XLA made of them.

XLA's GPU compiler takes a description of the card, and needs JAX's CUDA plugin, but none of NVIDIA's libraries. Matrix
products are not autotuned, so on a card they may be other kernels. Nothing runs, so times are unknown.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

# Before the plugin is loaded: otherwise it asks the driver, which is missing.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxspec.compilation import graph_options, lower_ahead, without_symbols
from jaxspec.step.addresses import ProgramSpec

without_symbols()

#: `xla.gpu.GpuTargetConfigProto` as text. With a driver and toolkit that know them (CUDA 12.3), XLA puts loops and
#: conditionals into CUDA graphs.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block_optin: {shared_memory_optin}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  compile_time_toolkit_version: "12.9.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""

#: NVIDIA's data sheets and CUDA programming guide.
CARDS: dict[str, dict[str, Any]] = {
    "h200": dict(
        name="NVIDIA H200", major=9, minor=0, cores=132, fpus=128, threads=2048, clock=1.98, l2=62_914_560,
        bandwidth=4_800_000_000_000, memory=150_000_000_000, shared_memory=233_472, shared_memory_optin=232_448,
    ),
    "h100": dict(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, cores=132, fpus=128, threads=2048, clock=1.98, l2=52_428_800,
        bandwidth=3_352_000_000_000, memory=84_900_000_000, shared_memory=233_472, shared_memory_optin=232_448,
    ),
    "a100": dict(
        name="NVIDIA A100-SXM4-80GB", major=8, minor=0, cores=108, fpus=64, threads=2048, clock=1.41, l2=41_943_040,
        bandwidth=2_039_000_000_000, memory=84_900_000_000, shared_memory=167_936, shared_memory_optin=166_912,
    ),
    "l4": dict(
        name="NVIDIA L4", major=8, minor=9, cores=58, fpus=128, threads=1536, clock=2.04, l2=50_331_648,
        bandwidth=300_000_000_000, memory=23_600_000_000, shared_memory=102_400, shared_memory_optin=101_376,
    ),
}  # fmt: skip

#: JAX 0.11 or later.
_NEWER_JAX = hasattr(jax.sharding, "AbstractDevice")
#: Thunks that launch a kernel.
_KERNELS = {"kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCustomCall", "kCubSort", "kConvolution"}
#: A line of XLA's thunk sequence: indentation, kind, and the rest with the kernel's name.
_THUNK = re.compile(r"^( *)\d+: (k\w+) *\[[^]]*\](.*)$", re.MULTILINE)


class Thunk(NamedTuple):
    """An operation of a compiled program. depth: 0 outside all CUDA graphs and loops."""

    depth: int
    kind: str
    name: str


@dataclass(frozen=True)
class Compiled:
    """A compiled program: what it runs, in order, and the PTX code of its kernels."""

    program: jax.stages.Compiled
    spec: ProgramSpec
    thunks: tuple[Thunk, ...]
    ptx: str

    @property
    def outside(self) -> list[str]:
        """Kinds of the operations that the host starts one by one."""
        return [thunk.kind for thunk in self.thunks if thunk.depth == 0]

    @property
    def always(self) -> list[Thunk]:
        """Operations of the CUDA graph that run in every step: those outside conditionals and loops."""
        return [thunk for thunk in self.thunks if thunk.depth == 1]

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that run in every step, in order."""
        return [thunk.name for thunk in self.always if thunk.kind in _KERNELS]

    def named(self, name: str) -> int:
        """Kernels whose name begins like this."""
        return sum(thunk.name.startswith(name) for thunk in self.thunks)

    @property
    def sorts(self) -> bool:
        """Whether the program sorts anything, in any of its branches."""
        return re.search("sort|topk", self._hlo, re.IGNORECASE) is not None

    @property
    def rewritten(self) -> list[str]:
        """Kinds of the operations that read or write an array that moves, and are rewritten before each launch: those
        of the main computation. One that passes such an array on to a branch or a loop counts once."""
        entry = self._hlo[self._hlo.index("\nENTRY") :]
        numbers = "|".join(map(str, (*self.spec.moving, len(self.spec.arguments) - 1)))
        moving = re.findall(rf'%(\S+) = \S+ parameter\(.*op_name="arguments\[(?:{numbers})\]', entry)
        assert moving
        reads = re.compile("|".join(rf"%{re.escape(name)}(?=[,)])" for name in moving))
        operations = re.findall(r"^ +(?:ROOT )?%\S+ = .*?\s([a-z][\w-]*)\((.*)$", entry, re.MULTILINE)
        return [kind for kind, rest in operations if reads.search(rest.split(", metadata=")[0])]

    @property
    def in_place(self) -> bool:
        """Whether all donated arguments, pools and outbox, are updated where they are."""
        donated = [self.spec.arguments[i] for i in self.spec.donate]
        return self.aliased_bytes >= sum(map(_bytes, jax.tree.leaves(donated)))

    @property
    def _hlo(self) -> str:
        text = self.program.as_text()
        assert text is not None
        return text

    @property
    def temporary_bytes(self) -> int:
        return self._memory.temp_size_in_bytes

    @property
    def aliased_bytes(self) -> int:
        """Bytes of arguments that are updated in place."""
        return self._memory.alias_size_in_bytes

    @property
    def _memory(self) -> Any:
        return self.program.memory_analysis()


def _bytes(array: Any) -> int:
    """Bytes on one device."""
    split = isinstance(array.sharding, NamedSharding)
    return prod(array.sharding.shard_shape(array.shape) if split else array.shape) * array.dtype.itemsize


@cache
def devices(card: str, count: int) -> Any:
    """Devices of one machine to compile for."""
    return topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET.format(**CARDS[card]), topology=f"1x1x{count}"
    ).devices


def _described(card: str) -> AbstractContextManager[Any]:
    """Since JAX 0.11 Pallas asks for the device when it lowers a kernel. A description is enough."""
    if not _NEWER_JAX:
        return nullcontext()
    described = jax.sharding.AbstractDevice(device_kind=CARDS[card]["name"], num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=described))


def abstract(tree: Any, card: str) -> Any:
    """The shapes and dtypes of a pytree's arrays, on the card, unless they are split over several."""
    sharding = SingleDeviceSharding(devices(card, 1)[0])

    def of(x: Any) -> jax.ShapeDtypeStruct:
        given = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given if isinstance(given, NamedSharding) else sharding)

    return jax.tree.map(of, tree)


def _lowered(card: str, fn: Callable[..., Any], arguments: tuple[Any, ...], donate: int | tuple[int, ...] = ()) -> Any:
    with _described(card):
        return lower_ahead(fn, *abstract(arguments, card), donate=donate, platform="cuda")


def optimised(card: str, fn: Callable[..., Any], *arguments: Any) -> str:
    """The HLO that XLA makes of `fn` for a card."""
    return _lowered(card, fn, arguments).compile(compiler_options=graph_options("gpu")).as_text()


def compile_for(card: str, spec: ProgramSpec) -> Compiled:
    """Compile a program for a card as `Executable` does on a machine that has it."""
    lowered = _lowered(card, spec.program, spec.arguments, spec.donate)
    with tempfile.TemporaryDirectory() as folder:
        dump: dict[str, str | bool] = {"xla_dump_to": folder}
        if _NEWER_JAX:  # dumps PTX on request; before, this option would dump the code after each of many passes
            dump["xla_dump_emitter_re"] = ".*"
        program = lowered.compile(compiler_options=graph_options("gpu") | dump)
        files = sorted(Path(folder).iterdir())
        sequence = [f for f in files if "thunk_sequence_after_thunk_passes" in f.name][-1].read_text()
        ptx = "\n".join(f.read_text() for f in files if f.suffix == ".ptx")
    thunks = (Thunk(len(m[1]) // 4, m[2], m[3].strip().split(" ")[0]) for m in _THUNK.finditer(sequence))
    return Compiled(program, spec, tuple(thunks), ptx)
