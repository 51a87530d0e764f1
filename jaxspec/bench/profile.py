"""Show the profile: the measured step and draft times of this machine, on which scheduling and drafting decide.

The engine measures them once and keeps them in the cache folder. --renew measures them again, for example if the
first start was on a busy machine.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import terminal

if TYPE_CHECKING:
    from jaxspec.step.profiles import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument("--renew", action="store_true", help="measure again and keep the new times")
    parser.add_argument("--json", metavar="FILE", help="write the times as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the profile. Raises `BenchError` if the engine cannot be created."""
    from jaxspec.config import EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.progress import bar

    try:
        config = EngineConfig.load(args.config, **{**options.COMPILE_ALL_FIRST, **options.overrides(args)})
        with bar() as progress:
            engine = Engine(config, progress=progress, renew_profiles=args.renew)
    except (OSError, ValueError) as error:
        raise BenchError(str(error)) from None
    profiles, verify_budget = engine.profiled, engine.step_times.verify_budget()
    engine.shutdown()
    console = Console()
    for profile in profiles:
        rows = ([name, 1e3 * profile.seconds[name]] for name in profile.names)
        console.print(terminal(rows, profile.what, ("ms", "{:.2f}"), title=f"measured {_when(profile)}"))
    console.print(f"verify budget: {verify_budget} tokens (AdaServe's B); larger steps are compute-bound")
    if args.json:
        times = {p.what: {"measured": _when(p), "seconds": p.seconds} for p in profiles}
        about = {"machine": machine(), "model": engine.model_name, "budget": verify_budget}
        write_json(args.json, about | {"profiles": times})
    return 0


def _when(profile: Profile) -> str:
    assert profile.measured is not None, "with COMPILE_ALL_FIRST the engine measures on start"
    return profile.measured.isoformat(timespec="minutes")
