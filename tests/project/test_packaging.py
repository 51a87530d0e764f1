"""What goes into the wheel: every package, every data file, and each of them once."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from helpers.paths import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    """Where setuptools looks: the longest prefix that is mapped, then the rest of the name."""
    parts = package.split(".")
    for cut in range(len(parts), 0, -1):
        if mapped := SETTINGS["package-dir"].get(".".join(parts[:cut])):
            return ROOT.joinpath(mapped, *parts[cut:])
    raise AssertionError(package)


def test_every_package_is_named_once() -> None:
    packages = SETTINGS["packages"]
    assert len(packages) == len(set(packages))
    tops = [ROOT / mapped for mapped in SETTINGS["package-dir"].values()]
    found = {Path(folder) for top in tops for folder, _, files in os.walk(top) if "__init__.py" in files}
    papers = {folder for folder in found if "papers" in folder.parts}  # experiments run from a checkout
    assert papers
    assert {folder_of(package) for package in packages} == found - papers
    # Neither tests nor examples.
    assert {path.relative_to(ROOT).parts[0] for path in found} == {"jaxspec", "models", "sched", "train_predictor"}
    assert not any(folder.is_symlink() for folder in found)


def test_every_data_file_is_named() -> None:
    for package in SETTINGS["packages"]:
        patterns = SETTINGS["package-data"].get(package, [])
        folder = folder_of(package)
        places = "*", "trained/*", "probes/*", "ui/*"
        data = [path.relative_to(folder) for place in places for path in folder.glob(place) if path.is_file()]
        left_out = [str(path) for path in data if not any(fnmatch(str(path), p) for p in ("*.py", *patterns))]
        assert not left_out, package


def test_the_links_make_the_source_tree_importable() -> None:
    """`jaxspec.sched` and the like without an installation; links are relative, so that a clone has them."""
    for name in ("sched", "models", "train_predictor"):
        assert os.readlink(ROOT / "jaxspec" / name) == f"../{name}"
    script = "import jaxspec.sched, jaxspec.models.config as c; print(c.__file__)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd="/", env=env, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "jaxspec" / "models" / "config.py")


def test_a_clone_called_jaxspec_does_not_hide_the_package(tmp_path: Path) -> None:
    """In its parent folder Python finds the clone first, as a namespace package. The installation must come before."""
    (tmp_path / "jaxspec").symlink_to(ROOT)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import jaxspec; print(jaxspec.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == ROOT / "jaxspec" / "__init__.py"
