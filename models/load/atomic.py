"""Writing a file at once or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it takes the place of `path` if the block ends without an error.

    A process that reads `path` meanwhile sees the old file or the new one, whole. The file gets the mode that the umask
    gives new files, whatever wrote it. Raises `OSError`.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    # Created as any file is, so that the system applies the umask: to ask for the umask is to set it, for all threads.
    handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        mode = os.fstat(handle).st_mode & 0o777
        os.close(handle)
        yield new
        os.chmod(new, mode)  # safetensors puts a file of its owner's alone in its place
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
