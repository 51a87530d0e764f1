"""The results: OUT/gpu.json with all numbers, and the tables of OUT/gpu.md. Does not import JAX."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.bench import BenchError
from jaxspec.bench.gpu import report
from jaxspec.bench.gpu.plan import Cell
from jaxspec.bench.report import write_json
from jaxspec.bench.sections import write

TITLE = "On an NVIDIA GPU"
#: What the numbers depend on, in the package's folder.
_CODE = "step", "kernels", "models", "compilation.py"


class Store:
    """The results of one model on one device; those of others in the same file are kept.

    The page shows the results that were added last. The files are replaced as a whole, so a run that is killed leaves
    complete ones.
    """

    def __init__(self, out: Path, model: str, setting: Mapping[str, Any], copy: str | None = None) -> None:
        """copy: path of a second file with all numbers. Raises `BenchError` if the first holds something else."""
        self.file, self.page, self._copy = out / "gpu.json", out / "gpu.md", copy
        self._found = read(self.file)
        name = f"{model} on {setting['device']}"
        results = self._found.setdefault("results", {})
        self._own = results.setdefault(name, {"cells": {}})
        self._own |= {"model": model, "setting": {**setting, "code": code()}}
        self._found["shown"] = name

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The numbers by `Cell.key`."""
        return self._own["cells"]

    @property
    def verdict(self) -> str:
        return report.verdict(self._own)

    def has(self, cell: Cell) -> bool:
        """Whether the cell was measured with this code and this version of JAX. A failed one was not."""
        found, setting = self.cells.get(cell.key), self._own["setting"]
        if found is None or "error" in found:
            return False
        return (found["code"], found["jax"]) == (setting["code"], setting["jax"])

    def failed(self, cell: Cell) -> bool:
        """Whether the cell failed when it was last measured, or the run ended in it."""
        return self._own.get("begun") == cell.key or "error" in self.cells.get(cell.key, {})

    def begin(self, cell: Cell) -> None:
        """Note that the cell is being measured."""
        self._own["begun"] = cell.key
        _replace(self.file, self._found)

    def add(self, cell: Cell, numbers: Mapping[str, Any], seconds: float) -> None:
        """Store a cell's numbers, in place of earlier ones, and write both files."""
        setting = self._own["setting"]
        self._own.pop("begun", None)
        self.cells[cell.key] = {
            "kind": cell.kind, **numbers, "seconds": seconds, "time": time.strftime("%Y-%m-%d %H:%M"),
            "code": setting["code"], "jax": setting["jax"],
        }  # fmt: skip
        self.publish()

    def publish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        _replace(self.file, self._found)
        if self._copy:
            _replace(Path(self._copy), self._found)
        write(self.page, TITLE, report.sections(self._own))


def _replace(path: Path, content: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    write_json(new, content)
    os.replace(new, path)


def read(path: Path) -> dict[str, Any]:
    """The content of a file of results; empty if there is none. Raises `BenchError` if it is something else."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise BenchError(f"{path} does not hold an earlier run's numbers: {error}") from None
    if not isinstance(found, dict) or (found and "results" not in found):
        raise BenchError(f"{path} does not hold an earlier run's numbers")
    return found


def code() -> str:
    """A digest of the code that is measured."""
    root, digest = Path(jaxspec.__file__).parent, hashlib.sha256()
    for name in _CODE:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
