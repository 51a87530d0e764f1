"""XLA's options for compiling quickly: tests compile thousands of programs and run each only a few times."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType

#: Fusions through XLA's older emitters take less than half the time of those through MLIR. jaxlib 0.11 has no such
#: emitters, and an option that XLA does not know is an error.
_EMITTERS = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11)
#: For one program.
OPTIONS: dict[str, str | bool | int] = {"xla_backend_optimization_level": 0}
if _EMITTERS:
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
#: For all programs of a process.
_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


def environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """For a process that compiles quickly: this one's variables and `more`."""
    variables = {**os.environ, **more}
    return {**variables, "XLA_FLAGS": f"{variables.get('XLA_FLAGS', '')} {_FLAGS}"}
