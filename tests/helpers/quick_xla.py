"""XLA's options for compiling quickly: tests compile thousands of programs and run each only a few times."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType

#: Options for one program with which it compiles as for users, though the process compiles quickly: XLA's defaults.
AS_FOR_USERS: dict[str, str | bool | int] = {"xla_backend_optimization_level": 3}
_FLAGS = "--xla_backend_optimization_level=0"
# Fusions through XLA's older emitters take less than half the time of those through MLIR. jaxlib 0.11 has no such
# emitters, and an option that XLA does not know is an error.
if tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11):
    AS_FOR_USERS["xla_cpu_use_fusion_emitters"] = True
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"


def environment(more: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """For a process that compiles quickly: this one's variables and `more`."""
    variables = {**os.environ, **more}
    flags = variables.get("XLA_FLAGS", "")
    return variables if _FLAGS in flags else {**variables, "XLA_FLAGS": f"{flags} {_FLAGS}"}
