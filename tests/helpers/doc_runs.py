"""Runs commands of the pages through their real entry points, in this process where possible."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from helpers import quick_xla
from helpers.checkpoints import GOLDEN
from helpers.doc_commands import ROOT, Command
from helpers.doc_sizes import RUNS, Run
from helpers.patience import PATIENCE
from jaxspec.bench.__main__ import COMMANDS

#: Timeout of a process in seconds.
LONGEST = 300
#: Options that name an output file.
_WRITTEN = ("--json", "--plot", "--timeline", "--out", "--profile")
#: Placeholders of the pages for several presets.
_PRESETS = {"PRESETS": ["fcfs.yaml", "sjf.yaml"]}


def size_of(command: Command) -> Run | None:
    """The entry of `RUNS` for a command."""
    words = command.arguments
    return next((run for run in RUNS if command.begins(run.called) and all(o in words for o in run.with_)), None)


def run(command: Command, folder: Path, patch: pytest.MonkeyPatch, url: str = "") -> None:
    """Run a command in `folder`, prepared by `doc_data.write`, at the small size of its `RUNS` entry; only read its
    options if another test runs it."""
    size = size_of(command)
    assert size, command.place
    for name, value in size.constants.items():
        module, _, constant = name.rpartition(".")  # imported: `papers.ssjf` as an attribute is the experiment alone
        raising = not module.endswith("report")  # a report imports only some of its experiment's constants
        patch.setattr(importlib.import_module(module), constant, value, raising=raising)
    patch.chdir(folder)
    models = {"model": "path/to/folder", "encoder": str(GOLDEN / "encoder"), "url": url}
    module, *given = shlex.split(command.called)
    argv = [word for name in given for word in _PRESETS.get(name, [name])]
    if size.by:
        read: list[object] = []
        patch.setattr(importlib.import_module(COMMANDS[argv[0]][0]), "run", lambda args: read.append(args) or 0)
        assert main_of(module)(argv) == 0 and read, command.place
        return
    argv += re.sub(r"\{(\w+)\}", lambda name: models[name[1]], size.more).split()
    if module == "jaxspec.serve":
        serve(argv, command.environment)
    elif command.environment:  # JAX reads it when it starts
        start = [sys.executable, "-m", module, *argv]
        done = subprocess.run(start, env=quick_xla.environment(command.environment), timeout=LONGEST, check=False)
        assert done.returncode == 0, f"{command.place}: {shlex.join(start)} ended with {done.returncode}"
    else:
        assert main_of(module)(argv) == 0, f"{command.place}: {module} {shlex.join(argv)}"
    for option in _WRITTEN:
        for name in values(argv, option):
            assert Path(name).exists(), f"{command.place}: {option} {name} was not written"


def sends_load(command: Command) -> bool:
    """Whether it needs a running server: then it is in `test_docs_server.py`."""
    return command.begins("jaxspec.bench serve") or command.begins("jaxspec.bench overload")


def main_of(module: str):
    """The function that `python -m MODULE` calls."""
    package = importlib.import_module(module)
    entry = importlib.import_module(f"{module}.__main__") if hasattr(package, "__path__") else package
    return entry.main


def serve(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server on a free port, send it a request, and stop it with SIGTERM."""
    command = [sys.executable, "-m", "jaxspec.serve", *argv, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=quick_xla.environment(environment)
    ) as process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            found = re.search(r"http://\S+", greeting)
            assert found, f"the server did not start: {shlex.join(command)}"
            body = {"prompt": "Owls", "max_tokens": 4, "ignore_eos": True}
            keys = values(argv, "--api-key")
            headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
            answer = httpx.post(f"{found[0]}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=PATIENCE) == 0
        finally:
            process.kill()


def values(argv: Sequence[str], option: str) -> list[str]:
    """The value of `option` as a list; the last one if it is given several times, empty if never."""
    return [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == option][-1:]


def dry(command: Command) -> list[Command]:
    """The programs of this project that `make` would start, from `make -n`. Raises `CalledProcessError`."""
    hidden = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "EXTRAS", "PYTHON", "VENV", "PEERS", "CUDA")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    words = shlex.split(command.called)
    shown = subprocess.run(
        [words[0], "--dry-run", *words[1:]], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    started = (line for line in shown.stdout.splitlines() if "-m jaxspec" in line)
    return [Command(command.page, command.line, line) for line in started]
