"""Compiles the kernels with the system's C compiler, once per machine.

They are built at the first start and not shipped, to use this CPU's vector instructions and the headers of the
installed XLA.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxspec.paths import cache_folder

log = logging.getLogger(__name__)

#: XLA FFI handlers that the library exports.
SYMBOLS = (
    "jaxspec_linear", "jaxspec_grouped", "jaxspec_columns", "jaxspec_attention", "jaxspec_commit",
    "jaxspec_commit_quantized", "jaxspec_zeros", "jaxspec_norm", "jaxspec_probe",
)  # fmt: skip

_FOLDER = Path(__file__).parent
_MACHINE = platform.machine().lower()
_NATIVE: tuple[str, ...] = ()
if _MACHINE in ("x86_64", "amd64"):
    _NATIVE = ("-march=native", "-mprefer-vector-width=512")  # clang defaults to 256 bits on Intel
elif _MACHINE in ("aarch64", "arm64"):
    _NATIVE = ("-mcpu=native",)
_FLAGS = (
    # no-unroll-loops: clang would unroll the loops over the depth, whose accumulators already fill the registers.
    # no-sanitize: zig's compiler checks for undefined behaviour by default.
    "-std=c11", "-O3", *_NATIVE, "-ffp-contract=fast", "-fno-unroll-loops", "-fno-sanitize=undefined", "-fPIC",
)  # fmt: skip
_INSTALL = 'install one with `apt install gcc`, or in a checkout with `.venv/bin/pip install -e ".[zig]"`'
#: Seconds. The longest file takes ten.
_TIMEOUT = 300


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be built; the message says why."""


def build(compiler: str | None = None) -> Path:
    """Path of the shared library, compiled unless it is in the cache. Raises `KernelsUnavailable`.

    `compiler`: a command, or `zig` for the `ziglang` package; default: the first of `compilers` that works.
    """
    commands = compilers() if compiler is None else [_command(compiler)]
    folder = cache_folder("kernels")
    code = _digest(_FLAGS, jax.__version__, _MACHINE, _cpu(), *map(Path.read_bytes, sources()))
    # The key contains all compilers that may be tried, not the one that worked: failing ones are not tried again at
    # every start, but a new, updated or newly configured ($CC) compiler is tried. Compilers are identified by their
    # files because `--version` takes longer.
    name = f"cpu-{code}-{_digest(*map(_identity, commands))}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        if not _defect(library):
            return library
    reasons = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "cpu.so"
                reason = _compile(command, built) or _unloadable(built)
                if reason is None:
                    library = folder / f"{name}-{_digest(built.read_bytes())}.so"
                    built.replace(library)  # atomic: another process may be reading
                    return library
            reasons.append(f"{shlex.join(command)}: {reason}")
            log.warning("a C compiler cannot build the CPU kernels: %s", reasons[-1])
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {folder}: {error}") from None
    for library in sorted(folder.glob(f"cpu-{code}-*.so")):
        if compiler is None and not _defect(library):  # built when there was a compiler
            return library
    raise KernelsUnavailable("; ".join(["no C compiler that can build them was found", *reasons, _INSTALL]))


def compilers() -> list[list[str]]:
    """Commands to try, in order: `$CC`, the system's compilers, the `ziglang` package."""
    named = [name for name in (os.environ.get("CC", ""),) if name.strip()]
    found = [path for name in ("cc", "clang", "gcc") if (path := shutil.which(name))]
    zig = ["zig"] if importlib.util.find_spec("ziglang") else []
    return [*map(_command, named), *([path] for path in found), *map(_command, zig)]


def sources() -> list[Path]:
    """Source files, including headers."""
    return sorted(_FOLDER.glob("*.[ch]"))


def _command(compiler: str) -> list[str]:
    if compiler == "zig":
        return [sys.executable, "-m", "ziglang", "cc"]
    try:
        return shlex.split(compiler)
    except ValueError:  # unbalanced quotes
        return [compiler]


def _identity(command: list[str]) -> tuple[object, ...]:
    """Identifies a compiler and its version by its file, without running it."""
    path = shutil.which(command[0])
    if command == _command("zig"):
        spec = importlib.util.find_spec("ziglang")
        path = spec.origin if spec else None
    try:
        about = os.stat(path) if path else None
    except OSError:
        about = None
    return (*command, about and (os.path.realpath(str(path)), about.st_size, about.st_mtime_ns))


def _flags(command: list[str]) -> list[str]:
    """The flags for a compiler, without those that a command such as `cc -march=x86-64-v3` or `cc -fsanitize=address`
    has its own of."""
    own = {("-march", "-mcpu"): _NATIVE, ("-O",): ("-O3",), ("-fsanitize",): ("-fno-sanitize=undefined",)}
    dropped = {
        flag for starts, flags in own.items() for flag in flags if any(word.startswith(starts) for word in command)
    }
    return [flag for flag in _FLAGS if flag not in dropped]


def _compile(command: list[str], target: Path) -> str | None:
    """Compile to `target`, on all cores, with files for the linker next to it. Returns None, or why it failed."""
    files = sorted((path for path in sources() if path.suffix == ".c"), key=lambda path: -path.stat().st_size)
    objects = [target.with_name(f"{path.stem}.o") for path in files]
    run = [*command, *_flags(command)]
    each = [*run, f"-I{_FOLDER}", f"-I{jax.ffi.include_dir()}", "-c"]
    calls = [[*each, str(file), "-o", str(to)] for file, to in zip(files, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the longest first; after a failure no further one begins
        failed = next(filter(None, pool.map(_run, calls)), None)
    return failed or _run([*run, "-shared", *map(str, objects), "-o", str(target), "-lm", "-pthread"])


def _run(command: list[str]) -> str | None:
    """Run a compiler. Returns None, or why it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"took more than {_TIMEOUT} s"
    except OSError as error:
        return str(error)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line.lower()), lines[-1]).strip()[:500]


def _defect(library: Path) -> str | None:
    """Why a cached library cannot be used, or None. Its name contains its digest: loading a partial file can crash."""
    try:
        if not library.stem.endswith(_digest(library.read_bytes())):
            return "it is damaged"
    except OSError as error:
        return str(error)
    return _unloadable(library)


def _unloadable(library: Path) -> str | None:
    """Why the library cannot be loaded, or None."""
    try:
        found = ctypes.CDLL(str(library))
    except OSError as error:
        return f"it does not load: {error}"
    missing = [name for name in SYMBOLS if not hasattr(found, name)]
    return f"it lacks {', '.join(missing)}" if missing else None


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _cpu() -> str:
    """Identifies the CPU's instruction set, because cache folders may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
