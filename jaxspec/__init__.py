"""jaxspec: an LLM serving engine with speculative decoding, whose unit of work is the token tree.

`LLM`, `AsyncLLM`, `Engine` and `EngineConfig` are imported on first use, so that `import jaxspec` does not import JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InvalidRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.structured_outputs import StructuredOutputs
from jaxspec.version import __version__

if TYPE_CHECKING:
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "EngineConfig",
    "InvalidRequest",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_LAZY = {
    "LLM": "jaxspec.llm",
    "AsyncLLM": "jaxspec.async_llm",
    "Engine": "jaxspec.engine.engine",
    "EngineConfig": "jaxspec.config",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
