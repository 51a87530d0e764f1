"""What make would install and run, with `make -n` and programs that stand in for a card, a compiler or a Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT

#: All that the Makefile calls, without a C compiler or nvidia-smi.
TOOLS = ("sh", "cat", "awk", "make", "rm", "touch", "mkdir")
#: Variables that would decide instead of the test.
DECIDING = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CC", "CUDA", "EXTRAS", "VENV", "PYTHON", "ARGS", "PYTHONPATH")

Make = Callable[..., subprocess.CompletedProcess[str]]


class Machine:
    """A PATH of its own and an empty place for the venv."""

    def __init__(self, folder: Path):
        self.bin, self.venv = folder / "bin", folder / "venv"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"the tests of the Makefile need {tool}"
            (self.bin / tool).symlink_to(found)

    def program(self, name: str, script: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def has(self, extras: str) -> None:
        """What was installed before; newer than pyproject.toml."""
        (self.venv / "bin").mkdir(parents=True, exist_ok=True)
        (self.venv / "bin" / "python").touch()
        (self.venv / ".installed").write_text(extras + "\n")

    def make(self, *arguments: str, dry: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in DECIDING}
        argv = ["make", *(["-n"] if dry else []), *arguments, f"VENV={self.venv}"]
        env |= {"PATH": str(self.bin), **variables}
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    def installed(self, *arguments: str, **variables: Any) -> str | None:
        """The extras that make would install; None where it would install nothing."""
        done = self.make(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        calls = [line for line in done.stdout.splitlines() if "pip" in line and "--editable" in line]
        assert len(calls) <= 1, calls
        return calls[0].split("--editable")[1].strip().strip('"') if calls else None

    def card(self, *lines: str) -> None:
        """An nvidia-smi that lists cards as "driver, compute capability"."""
        rows = "\n".join(lines)
        self.program("nvidia-smi", f"cat <<'EOF'\n{rows}\nEOF")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def usual(machine: Machine) -> Machine:
    """With a C compiler."""
    machine.program("cc", "exit 0")
    return machine


def test_serving_installs_no_test_packages(usual: Machine) -> None:
    assert usual.installed("serve") == "."
    assert usual.installed("install") == "."
    assert usual.installed("install", "EXTRAS=train,bench") == ".[bench,train]"
    assert usual.installed("test") == usual.installed("test-fast") == ".[test]"


def test_what_is_there_is_not_installed_again(usual: Machine) -> None:
    usual.has("base test train")
    assert usual.installed("serve") is None
    assert usual.installed("test") is None
    usual.has("base")
    assert usual.installed("serve") is None
    assert usual.installed("test") == ".[test]"
    usual.has("base train")
    assert usual.installed("test") == ".[test,train]", "what was there stays"


@pytest.mark.parametrize(
    ("lines", "extra", "notice"),
    [
        ([], ".", ""),
        (["No devices were found"], ".", ""),
        (["470.82.01, 8.0"], ".", "JAX needs NVIDIA driver 525 or newer, this is 470.82.01: the CPU is used"),
        (["525.60.13, 8.0"], ".[cuda12]", ""),
        (["535.183.01, 9.0"], ".[cuda12]", ""),
        (["580.65.06, 9.0"], ".[cuda13]", ""),
        (["580.65.06, 7.5"], ".[cuda13]", ""),
        (["580.65.06, 12.0"], ".[cuda13]", ""),
        (["580.65.06, 7.0"], ".[cuda12]", ""),
        (["580.65.06, 9.0", "580.65.06, 7.0"], ".[cuda12]", ""),
    ],
    ids=["no lines", "no card", "old driver", "525", "535", "580", "Turing", "Blackwell", "Volta", "one Volta"],
)
def test_the_card_decides_about_cuda(usual: Machine, lines: list[str], extra: str, notice: str) -> None:
    usual.card(*lines)
    assert usual.installed("serve") == usual.installed("install") == extra
    said = usual.make("serve").stderr
    assert notice in said and said.count("\n") == (1 if notice else 0)


def test_the_tests_do_not_look_for_a_card(usual: Machine) -> None:
    usual.card("580.65.06, 9.0")
    assert usual.installed("test") == ".[test]"
    assert 'JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"' in usual.make("test").stdout


def test_cuda_can_be_chosen(usual: Machine) -> None:
    usual.card("580.65.06, 9.0")
    assert usual.installed("serve", "CUDA=none") == "."
    assert usual.installed("serve", "CUDA=cuda12") == ".[cuda12]"
    assert usual.installed("serve", CUDA="cuda12") == ".[cuda12]"
    assert usual.installed("serve", "EXTRAS=cuda12") == ".[cuda12]"
    (usual.bin / "nvidia-smi").unlink()
    assert usual.installed("serve", "CUDA=cuda13") == ".[cuda13]"
    refused = usual.make("serve", "CUDA=13")
    assert refused.returncode == 2 and "CUDA is auto, none, cuda12 or cuda13" in refused.stderr


def test_another_choice_takes_the_other_plugin_away(usual: Machine) -> None:
    usual.has("base cuda12 test")
    assert usual.installed("serve") is None, "a card that is not seen just now takes nothing away"
    usual.card("580.65.06, 9.0")
    assert usual.installed("serve") == ".[cuda13,test]"
    uninstall = "uninstall --yes jax-cuda12-plugin jax-cuda12-pjrt"
    assert uninstall in usual.make("serve").stdout
    assert usual.installed("serve", "CUDA=cuda12") is None
    assert usual.installed("serve", "CUDA=none") == ".[test]"
    assert uninstall in usual.make("serve", "CUDA=none").stdout


def test_a_broken_nvidia_smi_means_the_cpu(usual: Machine) -> None:
    usual.program("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not reach the driver'; exit 9")
    assert usual.installed("serve") == "."
    assert "nvidia-smi fails, so JAX is installed for the CPU" in usual.make("serve").stderr


def test_a_driver_too_old_to_know_compute_cap(usual: Machine) -> None:
    usual.program("nvidia-smi", 'case "$*" in *compute_cap*) echo "not a valid field"; exit 2;; esac; echo 450.80.02')
    assert usual.installed("serve") == "."
    assert "this is 450.80.02" in usual.make("serve").stderr


def test_zig_comes_only_where_no_compiler_is(machine: Machine) -> None:
    assert machine.installed("serve") == ".[zig]"
    assert machine.installed("test") == ".[test,zig]"
    assert machine.installed("serve", CC="absent-cc") == ".[zig]"
    own = machine.program("my-cc", "exit 0")
    assert machine.installed("serve", CC=f"{own} -m64") == "."
    assert machine.installed("serve", "CC=my-cc") == "."
    for name in ("cc", "clang", "gcc"):
        compiler = machine.program(name, "exit 0")
        assert machine.installed("serve") == "."
        compiler.unlink()


def test_compiling_for_gpus_has_a_venv_of_its_own(usual: Machine, tmp_path: Path) -> None:
    done = usual.make("test-gpu-compile", f"GPU_COMPILE_VENV={tmp_path / 'cuda'}")
    assert done.returncode == 0, done.stderr
    assert usual.installed("test-gpu-compile") == ".[test]"
    assert f"{usual.venv}/bin/python .ci/gpu_compile_venv.py {tmp_path / 'cuda'}/bin/python" in done.stdout
    assert "cuda12]" not in done.stdout and "cuda13]" not in done.stdout


def test_ray_has_a_venv_of_its_own(usual: Machine, tmp_path: Path) -> None:
    done = usual.make("test-ray", f"RAY_VENV={tmp_path / 'ray'}")
    assert done.returncode == 0, done.stderr
    assert usual.installed("test-ray") == ".[test]"
    assert f"{usual.venv}/bin/python .ci/ray_venv.py {tmp_path / 'ray'}/bin/python" in done.stdout


def test_the_page_is_tested_in_a_venv_of_its_own(usual: Machine, tmp_path: Path) -> None:
    done = usual.make("test-ui", f"UI_VENV={tmp_path / 'ui'}")
    assert done.returncode == 0, done.stderr
    assert usual.installed("test-ui") == ".[test]"
    assert f"{usual.venv}/bin/python .ci/venv_on_top.py {tmp_path / 'ui'}/bin/python" in done.stdout
    browser = usual.program("chromium", "exit 0")
    assert f'CHROMIUM="{browser}"' in usual.make("test-ui", f"UI_VENV={tmp_path / 'ui'}").stdout


def test_lint_has_a_venv_of_its_own(usual: Machine, tmp_path: Path) -> None:
    done = usual.make("lint", f"LINT_VENV={tmp_path / 'lint'}")
    assert done.returncode == 0, done.stderr
    assert str(usual.venv) not in done.stdout and ".[lint" in done.stdout
    script = (ROOT / ".ci" / "run").read_text()
    assert [line for line in map(str.strip, script.splitlines()) if line.startswith("make")] == [
        "make test",
        "make test-families",
        "make test-ray",
        "make test-gpu-compile",
        "make test-ui",
        "make lint",
    ]


# gpu-check


def python(machine: Machine, ready: bool) -> None:
    """A python3 that says whether it is ready for the check, and prints what it is asked to run."""
    machine.program(
        "python3",
        f'case "$1" in .ci/gpu_ready.py) exit {0 if ready else 1};; *) echo "ran $* from $PYTHONPATH";; esac',
    )


def test_gpu_check_installs_nothing_where_jax_sees_the_card(usual: Machine) -> None:
    python(usual, ready=True)
    done = usual.make("gpu-check", "ARGS=--cells kernel", dry=False)
    assert done.returncode == 0, done.stderr
    tests, benchmark = (line for line in done.stdout.splitlines() if line.startswith("ran"))
    assert tests.startswith("ran -m pytest -W default -m gpu tests/") and tests.endswith(f" from {ROOT}")
    assert all((ROOT / name).exists() for name in tests.split() if name.startswith("tests/"))
    assert benchmark == f"ran -m jaxspec.bench gpu --minutes 6 --cells kernel from {ROOT}"
    full = usual.make("gpu-check", "ARGS=--full --minutes 20", dry=False).stdout
    assert f"ran -m jaxspec.bench gpu --full --minutes 20 from {ROOT}" in full
    assert "pip" not in done.stdout and not usual.venv.exists()


def test_gpu_check_measures_after_a_test_failed_too(usual: Machine) -> None:
    usual.program("python3", 'case "$2" in pytest) exit 1;; *) echo "ran $*";; esac')
    done = usual.make("gpu-check", dry=False)
    assert done.returncode == 2 and "ran -m jaxspec.bench gpu --minutes 6" in done.stdout


def test_gpu_check_installs_else(usual: Machine) -> None:
    python(usual, ready=False)
    done = usual.make("gpu-check", dry=False)
    assert done.returncode == 2 and "no NVIDIA GPU found on this machine" in done.stdout
    usual.card("580.65.06, 9.0")
    assert '--editable ".[cuda13,test]"' in usual.make("gpu-check").stdout


def test_gpu_check_says_what_is_missing() -> None:
    """This Python has all packages; one without any has none. What serving alone needs is not asked for."""
    argv = [sys.executable, ".ci/gpu_ready.py"]
    here = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | CPU)
    assert here.returncode == 1 and "JAX sees no GPU, only the cpu" in here.stdout
    argv = [sys.executable, "-S", "-E", ".ci/gpu_ready.py"]
    bare = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert bare.returncode == 1
    assert "missing: jax, flax, numpy" in bare.stdout and "hypothesis" in bare.stdout
    assert "fastapi" not in bare.stdout and "pytest-xdist" not in bare.stdout


def test_gpu_check_needs_what_it_imports() -> None:
    """The packages that gpu_ready.py asks for are those of pyproject.toml that the check imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["test"]
    named = {re.split(r"[>=\[]", text)[0] for text in asked}
    argv = [sys.executable, "-c", IMPORTED, *files_of_the_check()]
    env = os.environ | CPU | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / ".ci")])}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    imported, needed = json.loads(done.stdout)
    assert {name for name in named if name.lower() in imported} - {"optax"} == set(needed)  # flax brings optax along


def files_of_the_check() -> list[str]:
    """The test files that `make gpu-check` runs."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("ON_GPU")]
    return [word for word in line.split() if word.startswith("tests/")]


#: Imports what `make gpu-check` does, and prints the distributions that came along, and those that it asks for.
IMPORTED = """
import importlib.metadata, json, runpy, sys
import gpu_ready
import jaxspec.bench.gpu.measures, jaxspec.bench.gpu.store, jaxspec.bench.__main__
for file in ("tests/conftest.py", *sys.argv[1:]):
    runpy.run_path(file)
found = importlib.metadata.packages_distributions()
tops = {name.split(".")[0] for name in sys.modules}
names = {one.lower() for top in tops for one in found.get(top, ())}
print(json.dumps([sorted(names), sorted(gpu_ready.NEEDED)]))
"""


CPU = {"JAX_PLATFORMS": "cpu"}
