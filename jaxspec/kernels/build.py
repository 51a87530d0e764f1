"""Compiling the kernels, once a machine: with the C compiler of the `ziglang` package, for the CPU at hand.

Built at the first start rather than shipped, so that they use the vectors this CPU has and the headers of the XLA that
is installed.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from jaxspec.cache import cache_folder

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-sanitize=undefined", "-shared", "-fPIC",
)  # fmt: skip
#: Seconds; it takes one or two.
_TIMEOUT = 300


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def build() -> Path:
    """The shared library, compiled unless the cache has it. Raises `KernelsUnavailable`."""
    digest = hashlib.sha256(repr((_FLAGS, jax.__version__, platform.machine(), _cpu())).encode())
    for path in sources():
        digest.update(path.read_bytes())
    library = cache_folder("kernels") / f"cpu-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            _compile(built)
            built.replace(library)  # in one go: another process may be looking
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {library.parent}: {error}") from None
    return library


def sources() -> list[Path]:
    """What is compiled, headers included."""
    return sorted(_FOLDER.glob("*.[ch]"))


def _compile(target: Path) -> None:
    files = [str(path) for path in sources() if path.suffix == ".c"]
    includes = (f"-I{_FOLDER}", f"-I{jax.ffi.include_dir()}")
    command = [sys.executable, "-m", "ziglang", "cc", *_FLAGS, *includes, *files, "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"compiling them took more than {_TIMEOUT} s") from None
    if done.returncode:
        raise KernelsUnavailable(f"compiling them failed: {done.stderr.strip()[-2000:] or done.returncode}")


def _cpu() -> str:
    """What tells one CPU's instruction set from another's: caches are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
