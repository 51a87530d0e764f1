"""Shared by the training commands: options, checks before anything is loaded, and error lines."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxspec import extras
from jaxspec.config import ConfigError
from jaxspec.errors import reason


def parse(prog: str, about: str | None, presets: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv` with `parser`."""
    return parser(prog, about, presets).parse_args(argv)


def parser(prog: str, about: str | None, presets: str) -> argparse.ArgumentParser:
    """Options `config` and `set`, a list of KEY=VALUE. `presets`: a glob of example configs, for the help."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    made.add_argument("--config", required=True, metavar="YAML", help=f"a preset such as {presets}")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; repeatable")
    return made


def check_output(setting: str, file: str | Path) -> None:
    """Create the folder of an output file. Raises `ConfigError` naming the setting if the file cannot be written."""
    if Path(file).is_dir():
        raise ConfigError(f"{setting}: {file} is a folder")
    check_folder(setting, Path(file).parent)


def check_folder(setting: str, folder: str | Path) -> None:
    """Create a folder. Raises `ConfigError` naming the setting if files cannot be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot write to {folder}: {reason(error)}") from None


def lacking(error: ModuleNotFoundError) -> str:
    """The message that an extra is missing. Re-raises an `error` about any other module."""
    if (message := extras.lacking(error)) is None:
        raise error
    return message


def fail(prog: str, why: str) -> int:
    """Print one error line. Returns the exit status."""
    print(f"{prog}: {why}", file=sys.stderr)
    return 2
