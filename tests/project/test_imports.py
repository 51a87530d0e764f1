"""Dependencies point one way: the scheduler and the models know neither each other nor the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.patience import PATIENCE

KERNELS = "jaxspec.kernels"
ENGINE = ("jaxspec.engine", "jaxspec.llm", "jaxspec.step", "jaxspec.draft")
USERS = ("jaxspec.draft.distill", "jaxspec.train_predictor", "jaxspec.serve", "jaxspec.bench")
SERVING = ("jaxspec.config", "jaxspec.predict", KERNELS, *ENGINE, *USERS)

FORBIDDEN = {
    "jaxspec.sched": ("jax", "jaxlib", "flax", "optax", "jaxspec.models", *SERVING),
    "jaxspec.models": ("jaxspec.sched", *SERVING),
    "jaxspec.predict": (*ENGINE, *USERS),
}


def modules(package: str) -> list[tuple[str, Path]]:
    """Every module of a package as (dotted name, file)."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    names = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names.append((".".join((package, *(part for part in parts if part != "__init__"))), path))
    return names


def imported(path: Path) -> Iterator[str]:
    """Names of everything that a file imports, inside functions too. `from a import b` counts as a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_it_may(package: str):
    files = modules(package)
    assert len(files) > 2
    wrong = [
        f"{name} imports {target}"
        for name, path in files
        for target in imported(path)
        if any(target == bad or target.startswith(bad + ".") for bad in FORBIDDEN[package])
    ]
    assert not wrong


def test_the_scheduler_starts_without_jax():
    names = [name for name, _ in modules("jaxspec.sched")]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
wrong = [name for name in {[*FORBIDDEN["jaxspec.sched"]]!r} if name in sys.modules]
assert not wrong, wrong
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_only_what_is_deployed_imports_ray():
    """Which files they are, each says first."""
    wrong = [
        name
        for name, path in modules("jaxspec")
        for target in imported(path)
        if target.partition(".")[0] == "ray"
        and not (name.startswith("jaxspec.deploy.") and path.read_text().startswith('"""Needs Ray.'))
    ]
    assert not wrong


def test_the_package_itself_is_light():
    script = "import sys, jaxspec; assert 'jax' not in sys.modules and 'jaxspec.engine.engine' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
