"""Compiling the kernels, once a machine: with the system's C compiler, for the CPU at hand.

Built at the first start rather than shipped, so that they use the vectors this CPU has and the headers of the XLA that
is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from jaxspec.paths import cache_folder

log = logging.getLogger(__name__)

#: What a library exports: XLA's handlers.
SYMBOLS = ("jaxspec_linear", "jaxspec_attention", "jaxspec_commit", "jaxspec_commit_quantized", "jaxspec_zeros")

_FOLDER = Path(__file__).parent
_MACHINE = platform.machine().lower()
_NATIVE: tuple[str, ...] = ()
if _MACHINE in ("x86_64", "amd64"):
    _NATIVE = ("-march=native", "-mprefer-vector-width=512")  # clang halves vectors of 512 bits on Intel's CPUs else
elif _MACHINE in ("aarch64", "arm64"):
    _NATIVE = ("-mcpu=native",)
_FLAGS = (
    # clang would unroll loops over the depth, whose sums fill the registers already; zig's debugs undefined behaviour.
    "-std=c11", "-O3", *_NATIVE, "-ffp-contract=fast", "-fno-unroll-loops", "-fno-sanitize=undefined", "-shared",
    "-fPIC",
)  # fmt: skip
_INSTALL = 'install one with `apt install gcc`, or in a checkout with `.venv/bin/pip install -e ".[zig]"`'
#: Seconds; it takes one or two.
_TIMEOUT = 300


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def build(compiler: str | None = None) -> Path:
    """The shared library, compiled unless the cache has it. Raises `KernelsUnavailable`.

    With `compiler` (a command, or `zig` for the `ziglang` package's), or else the first of `compilers` that works.
    """
    commands = compilers() if compiler is None else [_command(compiler)]
    folder = cache_folder("kernels")
    code = _digest(_FLAGS, jax.__version__, _MACHINE, _cpu(), *map(Path.read_bytes, sources()))
    # All that might be tried count, not the one that worked: so a start need not try them again, and a compiler that is
    # new, updated or now asked for by $CC gets its turn. Files are looked at because `--version` takes longer.
    name = f"cpu-{code}-{_digest(*map(_identity, commands))}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        if not _flaw(library):
            return library
    reasons = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "cpu.so"
                why = _compile(command, built) or _unloadable(built)
                if why is None:
                    library = folder / f"{name}-{_digest(built.read_bytes())}.so"
                    built.replace(library)  # in one go: another process may be looking
                    return library
            reasons.append(f"{shlex.join(command)}: {why}")
            log.warning("a C compiler cannot build the CPU kernels: %s", reasons[-1])
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {folder}: {error}") from None
    for library in sorted(folder.glob(f"cpu-{code}-*.so")):
        if compiler is None and not _flaw(library):  # from when there was a compiler
            return library
    raise KernelsUnavailable("; ".join(["no C compiler that can build them was found", *reasons, _INSTALL]))


def compilers() -> list[list[str]]:
    """Commands to try, in this order: `$CC`, the system's compilers, and the one in the `ziglang` package."""
    named = [name for name in (os.environ.get("CC", ""),) if name.strip()]
    found = [path for name in ("cc", "clang", "gcc") if (path := shutil.which(name))]
    zig = ["zig"] if importlib.util.find_spec("ziglang") else []
    return [*map(_command, named), *([path] for path in found), *map(_command, zig)]


def sources() -> list[Path]:
    """What is compiled, headers included."""
    return sorted(_FOLDER.glob("*.[ch]"))


def _command(compiler: str) -> list[str]:
    if compiler == "zig":
        return [sys.executable, "-m", "ziglang", "cc"]
    try:
        return shlex.split(compiler)
    except ValueError:  # a quote that is not closed
        return [compiler]


def _identity(command: list[str]) -> tuple[object, ...]:
    """What differs between compilers and their versions, without running them."""
    path = shutil.which(command[0])
    if command == _command("zig"):
        spec = importlib.util.find_spec("ziglang")
        path = spec.origin if spec else None
    try:
        about = os.stat(path) if path else None
    except OSError:
        about = None
    return (*command, about and (os.path.realpath(str(path)), about.st_size, about.st_mtime_ns))


def _compile(command: list[str], target: Path) -> str | None:
    """Why it failed, None if it did not."""
    files = [str(path) for path in sources() if path.suffix == ".c"]
    includes = (f"-I{_FOLDER}", f"-I{jax.ffi.include_dir()}")
    try:
        done = subprocess.run(
            [*command, *_FLAGS, *includes, *files, "-o", str(target), "-lm"],
            capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"took more than {_TIMEOUT} s"
    except OSError as error:
        return str(error)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line.lower()), lines[-1]).strip()[:500]


def _flaw(library: Path) -> str | None:
    """Why a file of the cache cannot be used. Its name holds its digest, because loading half a file can be fatal."""
    try:
        if not library.stem.endswith(_digest(library.read_bytes())):
            return "it is damaged"
    except OSError as error:
        return str(error)
    return _unloadable(library)


def _unloadable(library: Path) -> str | None:
    try:
        found = ctypes.CDLL(str(library))
    except OSError as error:
        return f"it does not load: {error}"
    missing = [name for name in SYMBOLS if not hasattr(found, name)]
    return f"it lacks {', '.join(missing)}" if missing else None


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _cpu() -> str:
    """What tells one CPU's instruction set from another's: caches are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
