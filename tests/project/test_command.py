"""The `jaxspec` command: what it passes on, and what it answers itself, without JAX."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import jaxspec
from helpers.paths import ROOT
from helpers.patience import PATIENCE
from jaxspec import __main__ as command
from jaxspec.extras import PACKAGES, install_hint

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("argv", "module", "passed_on"),
    [
        (["serve", "--port", "0"], "jaxspec.serve.__main__", ["--port", "0"]),
        (["bench", "offline", "--help"], "jaxspec.bench.__main__", ["offline", "--help"]),
        (["train-predictor", "--config", "x"], "jaxspec.train_predictor.__main__", ["--config", "x"]),
        (["train-predictor", "collect", "--out", "x"], "jaxspec.train_predictor.collect", ["--out", "x"]),
        (["distill"], "jaxspec.draft.distill.__main__", []),
    ],
)
def test_arguments_and_exit_codes_pass_through(
    argv: list[str], module: str, passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def load(name: str) -> SimpleNamespace:
        given.append(name)
        return SimpleNamespace(main=lambda args: given.append(args) or 7)

    monkeypatch.setattr(command, "import_module", load)
    assert command.main(argv) == 7
    assert given == [module, passed_on]


def test_every_command_can_be_found() -> None:
    for each in command.COMMANDS.values():
        for module in (each.module, *each.steps.values()):
            assert find_spec(module) is not None, module


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["server"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "'server'" in said.err and "serve, bench, train-predictor, distill" in said.err
    assert command.main([]) == 2


def test_help_and_version_start_light() -> None:
    script = """
import sys
from jaxspec.__main__ import main
assert main(["--help"]) == 0 and main(["--version"]) == 0
heavy = {"jax", "flax", "numpy", "transformers", "fastapi", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=PATIENCE)
    for name in command.COMMANDS:
        assert sum(line.split()[:1] == [name] for line in done.stdout.splitlines()) == 1
    assert done.stdout.splitlines()[-1] == f"jaxspec {jaxspec.__version__}"


def test_as_a_module() -> None:
    """A command's own exit code: what `jaxspec.serve` says to a wrong option."""
    argv = [sys.executable, "-m", "jaxspec", "serve", "--port", "x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "must be a port number" in done.stderr and done.stderr.count("\n") == 1


def test_the_distribution_is_not_somebody_elses() -> None:
    assert PYPROJECT["project"]["name"] == "jaxspec-serve"
    assert PYPROJECT["project"]["scripts"] == {"jaxspec": "jaxspec.__main__:main"}


def names(extra: str) -> set[str]:
    requirements = PYPROJECT["project"]["optional-dependencies"][extra]
    return {requirement.partition(">=")[0] for requirement in requirements}


def test_hints_name_the_packages_of_their_extra() -> None:
    for extra, packages in PACKAGES.items():
        assert set(packages) == names(extra)
        assert f'-e ".[{extra}]"' in install_hint(extra) and "install jaxspec" not in install_hint(extra)


def test_the_tests_have_what_they_need() -> None:
    """All optional packages but those of the hardware: no test may be skipped for lack of one."""
    assert names("bench") | names("retrieval") | names("sentencepiece") | names("train") <= names("test")


def test_no_page_or_message_fetches_a_strangers_package() -> None:
    root = ROOT
    folders = ("jaxspec", "models", "sched", "configs", "docs", ".ci")
    files = [root / "README.md", root / "CONTRIBUTING.md", root / "Makefile"]
    files += [
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in {".py", ".md", ".yaml"}
    ]
    by_name = re.compile(r"install\s+(-\S+\s+)*['\"]?jaxspec(?!-serve)|jaxspec\[")
    assert [path.name for path in files if by_name.search(path.read_text(encoding="utf-8"))] == []
