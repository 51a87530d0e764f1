"""Repeats the papers' experiments in the simulator, or scaled down on the real engine with --engine.

Each experiment keeps its numbers in OUT/PAPER.json and writes tables into OUT/PAPER.md between the marks there; text
outside the marks is kept. Numbers of earlier runs, simulated or on the engine, are kept too.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from jaxspec.bench import BenchError
from jaxspec.bench.papers.adaserve import experiment as adaserve
from jaxspec.bench.papers.alise import experiment as alise
from jaxspec.bench.papers.laps_sd import experiment as laps_sd
from jaxspec.bench.papers.spin import experiment as spin
from jaxspec.bench.papers.ssjf import experiment as ssjf
from jaxspec.extras import install_hint

PAPERS = {"ssjf": ssjf, "laps_sd": laps_sd, "alise": alise, "adaserve": adaserve, "spin": spin}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    papers = parser.add_subparsers(dest="paper", required=True, metavar="PAPER")
    for name, module in PAPERS.items():
        one = papers.add_parser(name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__)
        module.add_arguments(one)
        one.add_argument("--engine", action="store_true", help="run a scaled-down version on the real engine instead")
        one.add_argument(
            "--model", help="with --engine: built-in model name, folder or file (default: the engine's default model)"
        )
        one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --engine: any setting")
        one.add_argument("--repeats", type=int, metavar="N", help="random repetitions of each point, or engine turns")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--out", default="docs/results", metavar="DIR", help="output folder (default: docs/results)")
        one.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Run the chosen paper's experiments. Raises `BenchError` if they cannot run."""
    if not args.engine and find_spec("matplotlib") is None:
        raise BenchError(f"the figures need matplotlib: {install_hint('bench')}")
    return PAPERS[args.paper].run(args)
