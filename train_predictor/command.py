"""Shared by the training commands: options, error lines, and the message when an extra is missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxspec import extras


def parse(prog: str, about: str | None, presets: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `parser`."""
    return parser(prog, about, presets).parse_args(argv)


def parser(prog: str, about: str | None, presets: str) -> argparse.ArgumentParser:
    """Options `config` and `set`, a list of KEY=VALUE. `presets`: a glob of example configs, for the help."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    made.add_argument("--config", required=True, metavar="YAML", help=f"a preset such as {presets}")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; repeatable")
    return made


def lacking(error: ModuleNotFoundError) -> str:
    """The message that an extra is missing. Re-raises an `error` about any other module."""
    if (message := extras.lacking(error)) is None:
        raise error
    return message


def fail(prog: str, why: str) -> int:
    """Print one error line. Returns the exit status."""
    print(f"{prog}: {why}", file=sys.stderr)
    return 2
