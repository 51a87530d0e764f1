"""transformers, imported when it is first needed: it takes half a second, and GGUF files do without."""

from __future__ import annotations

import os
from types import ModuleType


def import_transformers() -> ModuleType:
    """The module; what it offers is imported as it is used."""
    # It would warn on stderr that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
