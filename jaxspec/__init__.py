"""jaxspec: an LLM serving engine with speculative decoding, whose unit of work is the token tree.

`LLM`, `Engine` and `EngineConfig` are imported on first use, so that `import jaxspec` does not import JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxspec.sampling_params import InvalidRequest, SamplingParams
from jaxspec.version import __version__

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.llm import LLM

__all__ = ["LLM", "Engine", "EngineConfig", "InvalidRequest", "SamplingParams", "__version__"]

_LAZY = {"LLM": "jaxspec.llm", "Engine": "jaxspec.engine.engine", "EngineConfig": "jaxspec.config"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
