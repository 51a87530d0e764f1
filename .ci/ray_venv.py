"""Completes the venv of `make test-ray`: `ray_venv.py PYTHON`, run by the engine's Python.

The venv adds the packages of the extra `ray`, 370 MB that no other test needs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from venv_on_top import complete

if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    complete(sys.argv[1], *project["optional-dependencies"]["ray"])
