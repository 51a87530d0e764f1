"""Repeats the papers' experiments in the simulator, or scaled down on the real engine with --engine.

Each experiment keeps its numbers in OUT/PAPER.json and writes tables into OUT/PAPER.md between the marks there, and the
headlines of all papers into OUT/README.md; text outside the marks is kept. Numbers of earlier runs, simulated or on the
engine, are kept too. A run that was stopped goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import headlines, page, variants
from jaxspec.bench.papers.adaserve import experiment as adaserve
from jaxspec.bench.papers.alise import experiment as alise
from jaxspec.bench.papers.laps_sd import experiment as laps_sd
from jaxspec.bench.papers.spin import experiment as spin
from jaxspec.bench.papers.ssjf import experiment as ssjf
from jaxspec.extras import install_hint

PAPERS: dict[str, Any] = {"ssjf": ssjf, "laps_sd": laps_sd, "alise": alise, "adaserve": adaserve, "spin": spin}
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    papers = parser.add_subparsers(dest="paper", required=True, metavar="PAPER")
    for name, module in PAPERS.items():
        one = papers.add_parser(name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__)
        _add_paper(one, module)
    every = papers.add_parser(ALL, help="all papers one after the other, simulated", description=__doc__)
    _add_common(every)


def _add_paper(parser: argparse.ArgumentParser, module: Any) -> None:
    _add_common(parser)
    page.add_files(parser, module.FILES)
    module.add_arguments(parser)
    variants.add_arguments(parser)
    engine = parser.add_argument_group("on the engine")
    engine.add_argument("--engine", action="store_true", help="run a scaled-down version on the real engine instead")
    engine.add_argument("--model", help="built-in model name, folder or file (default: the engine's default model)")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting of the engine")
    engine.add_argument("--repeats", type=options.count, metavar="N", help="turns of each system")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder with the files of prompts, lengths and traces")
    parser.add_argument("--quick", action="store_true", help="few seeds and loads: shows direction, not final numbers")
    parser.add_argument("--seeds", type=options.count, metavar="N", help="random repetitions of each simulated point")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--processes", type=options.count, default=os.cpu_count() or 1, metavar="N",
        help="simulations at the same time (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", default="build/papers", metavar="DIR",
        help="folder that keeps the results of single simulations, for going on after a stop (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", default="docs/results", metavar="DIR", help="output folder (default: docs/results)")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Run the chosen paper's experiments. Raises `BenchError` if they cannot run."""
    if not getattr(args, "engine", False) and find_spec("matplotlib") is None:
        raise BenchError(f"the figures need matplotlib: {install_hint('bench')}")
    if args.paper != ALL:
        PAPERS[args.paper].run(args)
    for name, module in PAPERS.items() if args.paper == ALL else ():
        parser = argparse.ArgumentParser()
        _add_paper(parser, module)
        of_paper = parser.parse_args([], argparse.Namespace(**{**vars(args), "paper": name, "json": None}))
        print(f"{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
        module.run(of_paper)
    write_index(Path(args.out))
    return 0


def write_index(out: Path) -> None:
    """Write the headlines of all papers with results in `out` into its README.md."""
    found = []
    for name, module in PAPERS.items():
        path = out / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            found.append((f"[{module.TITLE}]({name}.md)", f"`bench paper {name}`", module.headlines(kept)))
    page.write(out / "README.md", "Measurements", {"headlines": headlines.index(found)})
