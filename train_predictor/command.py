"""What the commands that train share: their options, and what they say where training is not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxspec.extras import install_hint


def parse(prog: str, about: str | None, presets: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """`config`, and `set`, a list of KEY=VALUE. `presets`: where there are examples of the former."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    parser.add_argument("--config", required=True, metavar="YAML", help=f"a preset, as {presets}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    return parser.parse_args(argv)


def lacking(error: ModuleNotFoundError) -> str:
    """That the extra `train` is missing. Raises `error` if it is about something else."""
    if (error.name or "").partition(".")[0] not in ("optax", "orbax"):
        raise error
    return f"{error.name} is missing, which training needs: {install_hint('train')}"


def fail(prog: str, why: str) -> int:
    """One line; -> the exit status."""
    print(f"{prog}: {why}", file=sys.stderr)
    return 2
