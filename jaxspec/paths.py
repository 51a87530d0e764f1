"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`kind` ("kernels", "compiled") within `$JAXSPEC_CACHE`, or else `~/.cache/jaxspec` (`$XDG_CACHE_HOME` counts)."""
    base = os.environ.get("JAXSPEC_CACHE")
    if not base:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxspec"
    return Path(base).expanduser() / kind
