"""Writing a file at once or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it takes the place of `path` if the block ends without an error.

    Whoever reads `path` meanwhile sees the old file or the new one, whole. Raises `OSError`.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)  # mkstemp's files are their owner's alone
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
