"""Completes a venv on top of the engine's: `venv_on_top.py PYTHON REQUIREMENT…`, run by the engine's Python.

The venv sees the packages of the engine's venv and adds others, which tests of a kind need and nothing else does.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def complete(python: str, *requirements: str) -> None:
    """Let the venv of `python` see this Python's packages, and install more; options of pip may be among them."""
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    engine = sysconfig.get_path("purelib")
    Path(own, "engine.pth").write_text(f"import site; site.addsitedir({engine!r})\n")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *requirements], check=True)


if __name__ == "__main__":
    complete(*sys.argv[1:])
