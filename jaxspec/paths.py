"""The cache folder, for files that can be regenerated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The subfolder `kind` ("kernels", "compiled") of `$JAXSPEC_CACHE`, by default `$XDG_CACHE_HOME/jaxspec` or
    `~/.cache/jaxspec`."""
    base = os.environ.get("JAXSPEC_CACHE")
    if not base:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxspec"
    return Path(base).expanduser() / kind
