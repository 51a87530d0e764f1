"""Damaged files in JAX's persistent cache of compiled programs.

A full disk or a killed process leaves part of a file. JAX compiles such a program again at every start: it never
overwrites a file of its cache. So damaged ones are removed as soon as JAX tells of one.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import jax

log = logging.getLogger(__name__)

#: What JAX warns of; its messages are all that it says. Files are named after the program, with a digest.
_FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']+)': (.*)", re.DOTALL)
#: How a file begins that is compressed with Zstandard; others are with zlib.
_ZSTD = b"\x28\xb5\x2f\xfd"
_show = warnings.showwarning


def watch() -> None:
    """From now on log what JAX warns of its cache, and remove damaged files. Other warnings are shown as before."""
    global _show
    if warnings.showwarning is not _shown:
        _show, warnings.showwarning = warnings.showwarning, _shown
    # Also the same message again: it may be of another file.
    warnings.filterwarnings("always", "Error (reading|writing) persistent compilation cache entry")


def _shown(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    if (failed := _FAILED.match(str(message))) is None:
        return _show(message, category, filename, lineno, file, line)
    what, program, reason = failed.groups()
    if what == "reading":
        log.warning("%s is compiled again, its file cannot be read: %.300s", program, reason)
    else:
        log.warning("%s cannot be kept for later starts: %.300s", program, reason)
    if folder := jax.config.values["jax_compilation_cache_dir"]:
        remove_damaged(Path(folder), program)


def remove_damaged(folder: Path, program: str) -> None:
    """Remove the files of this program that are not whole. One that cannot be removed stays, and the log says so."""
    for path in folder.glob(f"{program}-*-cache"):  # of all sizes and settings: which one it was is not told
        try:
            if not _whole(path.read_bytes()):
                path.unlink(missing_ok=True)
        except (OSError, MemoryError) as error:  # JAX does not expect that showing its warning fails
            log.warning("cannot remove %s, which may be damaged: %s", path.name, error)


def _whole(data: bytes) -> bool:
    """Whether all of it can be decompressed. Without a reader of Zstandard's files, they are taken as whole."""
    if not data.startswith(_ZSTD):
        try:
            zlib.decompress(data)
        except zlib.error:
            return False
        return True
    for name in ("zstandard", "compression.zstd"):  # what JAX uses if it is there
        with suppress(ImportError):
            zstd = importlib.import_module(name)
            try:
                zstd.decompress(data)
            except (zstd.ZstdError, EOFError):
                return False
    return True
