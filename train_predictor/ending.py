"""What a training command says at its end: which files it wrote, and the commands that come next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.train_predictor.command import fail
from jaxspec.train_predictor.names import DRAFTER, LENGTH, PROBE, answers_file, trained_file


def interrupted(prog: str, argv: Sequence[str] | None, kept: str) -> int:
    """Print what an interrupted command `kept`, and how to resume. Returns the exit status."""
    fail(prog, f"interrupted; {kept}; to resume:")
    print(called(prog, sys.argv[1:] if argv is None else argv), file=sys.stderr)
    return 130


def ended(files: Sequence[str | Path], *commands: str) -> None:
    """Print which files were written, and the commands that may come next."""
    for file in files:
        print(f"wrote {file} ({_size(Path(file).stat().st_size)})")
    for i, command in enumerate(commands):
        print(f"{'  or' if i else 'next'}: {command}", flush=True)


def training_commands(target: str, answers: str) -> list[str]:
    """The commands that train on a file of answers."""
    data = [] if answers == answers_file(target) else [f"data=[{answers}]"]
    configured = [word for setting in (f"target={target}", *data) for word in ("--set", setting)]
    return [
        called("jaxspec.train_predictor", ["--config", "configs/predictor/length.yaml", *configured]),
        called("jaxspec.train_predictor.probe", ["--target", target, *(["--data", answers] if data else [])]),
        called("jaxspec.draft.distill", ["--config", "configs/distill/eagle.yaml", *configured]),
    ]


def serve_command(target: str, predictor: str = "", probe: str = "", drafter: str = "") -> str:
    """The command that serves the target with these files, and with others that have been trained for it."""

    def there(kind: str) -> str:
        file = trained_file(target, kind)
        return file if Path(file).exists() else ""

    predictor, probe, drafter = predictor or there(LENGTH), probe or there(PROBE), drafter or there(DRAFTER)
    words = ["--model", target, "--config", f"configs/{'gittins' if probe else 'default'}.yaml"]
    words += ["--draft", "suffix", "--draft", drafter] if drafter else []
    for setting, file in (("predictor_model", predictor), ("length_probe", probe)):
        words += ["--set", f"{setting}={file}"] if file else []
    return called("jaxspec.serve", words)


def called(module: str, argv: Sequence[str]) -> str:
    """The command line of a module."""
    return shlex.join(["python", "-m", module, *argv])


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
