"""What the engine's programs take: the times that are measured once a machine and kept, shown or measured again.

Scheduling and drafting decide by these times. `--renew` measures them again, say after a first start on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json

if TYPE_CHECKING:
    from jaxspec.step.profiles import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--renew", action="store_true", help="measure again, and keep the new times")
    parser.add_argument("--json", metavar="FILE", help="write the times")


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where no engine can be made."""
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.progress import bar

    try:
        config = EngineConfig.load(args.config, **{**options.COMPILE_ALL_FIRST, **options.overrides(args)})
        with bar(sys.stderr.isatty()) as progress:
            engine = Engine(config, progress=progress, renew_profiles=args.renew)
    except (OSError, ValueError) as error:
        raise BenchError(str(error)) from None
    profiles, budget = engine.profiled, engine.step_times.verify_budget
    engine.shutdown()
    console = Console()
    for profile in profiles:
        console.print(_table(profile))
    console.print(f"a step stays bound by memory up to {budget} tokens (AdaServe's B)")
    if args.json:
        told = {p.what: {"measured": _when(p), "seconds": p.seconds} for p in profiles}
        write_json(args.json, {"machine": machine(), "model": engine.model_name, "budget": budget, "profiles": told})
    return 0


def _table(profile: Profile) -> Table:
    table = Table(profile.what, "ms", title=f"measured {_when(profile)}", title_justify="left")
    for name in profile.names:
        table.add_row(name, f"{1e3 * profile.seconds[name]:.2f}")
    return table


def _when(profile: Profile) -> str:
    assert profile.measured is not None, "the engine measures before it serves"
    return profile.measured.isoformat(timespec="minutes")
