"""The `jaxspec` command, also `python -m jaxspec`: it passes its arguments on to the command that comes first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from jaxspec.version import __version__


class Command(NamedTuple):
    """`module` has a `main(argv)`, as each module that runs with `python -m` has; `steps` are commands below it."""

    module: str
    summary: str
    steps: dict[str, str] = {}  # noqa: RUF012  (never changed)


COMMANDS = {
    "serve": Command("jaxspec.serve.__main__", "serve a model through an OpenAI-compatible API"),
    "bench": Command("jaxspec.bench.__main__", "measure: offline, against a server, simulated"),
    "train-predictor": Command(
        "jaxspec.train_predictor.__main__",
        "train a length predictor; `train-predictor collect` gathers its data",
        {"collect": "jaxspec.train_predictor.collect"},
    ),
    "distill": Command(
        "jaxspec.draft.distill.__main__",
        "train a drafter; `distill generate` writes the answers to train on",
        {"generate": "jaxspec.draft.distill.generate"},
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code; 2 where the command is not known."""
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
            # Imported late: only the command that runs is to import JAX.
            return import_module(module).main(rest)
    print(f"jaxspec: no command {args[0]!r}; there are {', '.join(COMMANDS)} (see --help)", file=sys.stderr)
    return 2


def usage() -> str:
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
