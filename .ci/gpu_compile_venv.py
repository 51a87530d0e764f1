"""Completes the venv of `make test-gpu-compile`: `gpu_compile_venv.py PYTHON`, run by the engine's Python.

The venv adds JAX's CUDA plugin in the engine's version, which would look for a driver in every test if it were
installed there. Without their dependencies the two wheels take half a gigabyte.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from venv_on_top import complete

if __name__ == "__main__":
    complete(sys.argv[1], "--no-deps", *(f"jax-cuda12-{part}=={version('jax')}" for part in ("pjrt", "plugin")))
