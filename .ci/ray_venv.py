"""Completes the venv of `make test-ray`: `ray_venv.py PYTHON`, run by the engine's Python.

The venv sees the packages of the engine's venv and adds those of the extra `ray`, 370 MB that no other test needs.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path


def main(python: str) -> None:
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    engine = sysconfig.get_path("purelib")
    Path(own, "engine.pth").write_text(f"import site; site.addsitedir({engine!r})\n")
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *project["optional-dependencies"]["ray"]], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
