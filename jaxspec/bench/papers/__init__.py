"""Repeats the papers' experiments in the simulator, or scaled down on the real engine with --engine.

Each experiment keeps its numbers in OUT/PAPER.json and writes tables into OUT/PAPER.md between the marks there, and the
headlines of all papers into OUT/README.md; text outside the marks is kept. Numbers of earlier runs, simulated or on the
engine, are kept too. With --quick OUT is another folder by default, with copies of the pages. A run that was stopped
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable
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
#: The output folder, and that of `--quick`, whose numbers are not final.
OUT, QUICK_OUT = Path("docs/results"), Path("build/papers/quick")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    papers = parser.add_subparsers(dest="paper", required=True, metavar="PAPER")
    for name, module in PAPERS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        one = papers.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        _add_paper(one, module)
    every = papers.add_parser(
        ALL, help="all papers one after the other, simulated", description=__doc__, allow_abbrev=False
    )
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
    parser.add_argument("--quick", action="store_true", help="few seeds and loads: shows direction, no verdicts")
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
    parser.add_argument("--out", metavar="DIR", help=f"output folder (default: {OUT}; with --quick {QUICK_OUT})")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Run the chosen paper's experiments. Raises `BenchError` if they cannot run."""
    if not getattr(args, "engine", False) and find_spec("matplotlib") is None:
        raise BenchError(f"the figures need matplotlib: {install_hint('bench')}")
    names = list(PAPERS) if args.paper == ALL else [args.paper]
    if args.out is None:
        args.out = str(quick_out(names) if args.quick else OUT)
    if args.paper != ALL:
        PAPERS[args.paper].run(args)
    for name, module in PAPERS.items() if args.paper == ALL else ():
        parser = argparse.ArgumentParser()
        _add_paper(parser, module)
        of_paper = parser.parse_args([], argparse.Namespace(**{**vars(args), "paper": name, "json": None}))
        print(f"{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
        module.run(of_paper)
    write_index(Path(args.out))
    show(Path(args.out), names)
    return 0


def quick_out(names: Iterable[str]) -> Path:
    """The output folder of `--quick`, with copies of these papers' pages, so that those of full runs stay the same."""
    QUICK_OUT.mkdir(parents=True, exist_ok=True)
    for name in ("README", *names):
        if (path := OUT / f"{name}.md").exists():
            shutil.copy(path, QUICK_OUT)
    return QUICK_OUT


def show(out: Path, names: Iterable[str]) -> None:
    """Print the headlines of these papers, and where their tables are."""
    for name in names:
        kept = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        print(*headlines.lines(PAPERS[name].headlines(kept)), sep="\n")
        print(f"Tables and figures: {out / f'{name}.md'}\nNumbers: {out / f'{name}.json'}\n", flush=True)


def write_index(out: Path) -> None:
    """Write the headlines of all papers with results in `out` into its README.md."""
    found = []
    for name, module in PAPERS.items():
        path = out / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            found.append((f"[{module.TITLE}]({name}.md)", f"`bench paper {name}`", module.headlines(kept)))
    page.write(out / "README.md", "Measurements", {"headlines": headlines.index(found)})
