"""`python -m jaxspec.bench …`: exit code 0 if all went well, 1 if requests failed, 2 if nothing could be measured."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from jaxspec.bench import BenchError
from jaxspec.bench.report import Report, print_table, write_json
from jaxspec.errors import explained
from jaxspec.extras import install_hint

#: name → (module, help); a module offers `add_arguments(parser)` and `run(args)`.
COMMANDS = {
    "offline": ("jaxspec.bench.offline", "generate for prompts that are all there from the start"),
    "serve": ("jaxspec.bench.serve", "send load to an OpenAI-compatible server"),
    "compare": ("jaxspec.bench.compare", "presets beside each other, taking turns in one process"),
    "scheduler": ("jaxspec.bench.scheduler", "what the decisions of a policy cost with many requests waiting"),
    "simulate": ("jaxspec.bench.simulate", "serve a trace or a synthetic load on a virtual clock"),
    "record": ("jaxspec.bench.record", "measure the engine for the simulator: step times, acceptance, events"),
    "paper": ("jaxspec.bench.papers", "a paper's experiments again, simulated and on the engine"),
    "predictor": ("jaxspec.bench.papers.ssjf.predictor", "length predictors beside each other: SSJF's ablation"),
    "profile": (
        "jaxspec.bench.profile",
        "what the engine's programs take, as measured and kept, or measured again",
    ),
    "startup": ("jaxspec.bench.startup", "how long a start takes until the first token"),
    "kv": ("jaxspec.bench.kv", "what INT8 KV costs in quality, and what swapping costs beside a step"),
    "kernels": ("jaxspec.bench.kernels", "the CPU kernels beside XLA's own operations, alternated"),
    "peers": ("jaxspec.bench.peers", "jaxspec beside transformers on torch, taking turns in one run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; argparse itself exits with 2 on wrong options."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, ModuleType] = {}
    for name, (module, summary) in COMMANDS.items():
        modules[name] = importlib.import_module(module)
        modules[name].add_arguments(subparsers.add_parser(name, help=summary, description=modules[name].__doc__))
    args = parser.parse_args(argv)
    try:
        check_outputs(args)
        report = modules[args.command].run(args)
        return finish(report, args) if isinstance(report, Report) else report
    except (BenchError, OSError) as error:
        print(f"jaxspec.bench: {explained(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxspec.bench: interrupted, nothing reported", file=sys.stderr)
        return 130


def check_outputs(args: argparse.Namespace) -> None:
    """Better to hear before a long run than after it that its results can't be kept. Raises `BenchError` or OSError."""
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).touch()
    if getattr(args, "plot", None) and find_spec("matplotlib") is None:
        raise BenchError(f"--plot needs matplotlib: {install_hint('bench')}")


def finish(report: Report, args: argparse.Namespace) -> int:
    """Shows and writes the report."""
    print_table(report)
    if args.json:
        write_json(args.json, report.to_json())
    if args.plot:
        from jaxspec.bench.plot import draw

        draw(report, args.plot)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
