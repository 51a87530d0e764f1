"""Completes the venv of `make test-gpu-compile`: `gpu_compile_venv.py PYTHON`, run by the engine's Python.

The venv sees the packages of the engine's venv. It adds JAX's CUDA plugin in the same version, which would look for a
driver in every test if it were installed there. Without their dependencies the two wheels take half a gigabyte.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path


def main(python: str) -> None:
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    engine = sysconfig.get_path("purelib")
    Path(own, "engine.pth").write_text(f"import site; site.addsitedir({engine!r})\n")
    wheels = [f"jax-cuda12-{part}=={version('jax')}" for part in ("pjrt", "plugin")]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, *wheels], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
