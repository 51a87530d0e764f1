"""The `jaxspec` command, also `python -m jaxspec`: runs the subcommand that its first argument names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from jaxspec.version import __version__


class Command(NamedTuple):
    """A subcommand: `main(argv)` of `module`. `steps` maps nested subcommands to their modules."""

    module: str
    summary: str
    steps: dict[str, str] = {}  # noqa: RUF012  (never mutated)


COMMANDS = {
    "serve": Command("jaxspec.serve.__main__", "serve a model through an OpenAI-compatible API"),
    "bench": Command("jaxspec.bench.__main__", "measure: offline, against a server, simulated"),
    "train-predictor": Command(
        "jaxspec.train_predictor.__main__",
        "train a length predictor; `train-predictor collect` collects its training data",
        {"collect": "jaxspec.train_predictor.collect"},
    ),
    "distill": Command(
        "jaxspec.draft.distill.__main__",
        "train a drafter on what `train-predictor collect` collects",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit status, or 2 if there is no such subcommand."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args:
        case []:
            print(usage(), file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(usage())
            return 0
        case ["-V" | "--version", *_]:
            print(f"jaxspec {__version__}")
            return 0
        case [name, *rest] if name in COMMANDS:
            command = COMMANDS[name]
            module = command.module
            if rest and rest[0] in command.steps:
                module = command.steps[rest.pop(0)]
            # Imported late, because not every command needs JAX.
            return import_module(module).main(rest)
    print(f"jaxspec: no command {args[0]!r}; choose from {', '.join(COMMANDS)} (see --help)", file=sys.stderr)
    return 2


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: jaxspec [--help] [--version] COMMAND ...",
            "",
            *(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            "`jaxspec COMMAND --help` lists a command's options.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
