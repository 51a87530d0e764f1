"""SPIN (arXiv 2503.15921): heterogeneous drafters chosen per request, verification without padding, a pipeline.

Without --engine, --verification or --pipeline the experiments are simulated at the paper's scale. Writes the numbers,
plots, and a page with tables next to the paper's numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxspec.bench import BenchError
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin import engine as spin_engine
from jaxspec.bench.papers.spin import options as spin_options
from jaxspec.bench.papers.spin import pipeline as spin_pipeline
from jaxspec.bench.papers.spin import simulation as spin_simulation
from jaxspec.bench.papers.spin.report import draw, sections
from jaxspec.errors import explained
from jaxspec.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--verification", action="store_true", help="compare packed and padded steps (Fig. 12)")
    kind.add_argument("--pipeline", action="store_true", help="measure micro-batches on the engine (Fig. 13)")
    spin_options.add_data(parser)
    spin_engine.add_arguments(parser)
    spin_pipeline.add_arguments(parser)
    spin_options.add_verification(parser)


def run(args: argparse.Namespace) -> int:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    out = Path(args.out)
    if args.engine:
        kind, numbers = "engine", spin_engine.on_engine(args)
    elif args.pipeline:
        kind, numbers = "pipeline", spin_pipeline.pipelined(args)
    elif args.verification:
        from jaxspec.bench.papers.spin.verification import verification

        kind, numbers = "verification", verification(args)
    else:
        kind, numbers = "simulated", simulated(args)
    kept = page.keep(out / "spin.json", kind, numbers, args.json)
    page.write(out / "spin.md", "SPIN", sections(kept))
    draw(out, kept)
    return 0


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Run all simulated experiments. Raises `BenchError` naming a missing option or a file that cannot be read."""
    for name in ("alpaca", "chat", "chat_answers", "chatbot"):
        if not getattr(args, name):
            raise BenchError(f"the simulation needs --{name.replace('_', '-')}")
    try:
        with progress("runs", spin_simulation.points()) as advance:
            return spin_simulation.simulate(args, advance)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
