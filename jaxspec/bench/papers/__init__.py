"""The experiments of papers, again: in the simulator, and scaled down on the real engine with --engine.

Each keeps its numbers in OUT/PAPER.json and writes them as tables into OUT/PAPER.md, between the marks there: what
stands outside of them, the explanations, is left as it is. The engine's numbers join those simulated before.
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
        one.add_argument("--engine", action="store_true", help="run the scaled-down version on the real engine instead")
        one.add_argument("--model", help="of --engine: a built-in name, folder or file (default: the engine's)")
        one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of --engine: any setting")
        one.add_argument("--repeats", type=int, metavar="N", help="random repetitions of each point")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--out", default="docs/results", metavar="DIR", help="default: docs/results")
        one.add_argument("--json", metavar="FILE", help="another copy of all the numbers")


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where nothing can be run."""
    if not args.engine and find_spec("matplotlib") is None:
        raise BenchError(f"the figures need matplotlib: {install_hint('bench')}")
    return PAPERS[args.paper].run(args)
