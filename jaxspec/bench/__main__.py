"""Benchmarks of the engine, the server and the scheduler, and the simulator.

Exit code: 0 success, 1 some requests failed or (peers) the machine was disturbed, 2 nothing could be measured, 130
interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from jaxspec.bench import BenchError
from jaxspec.bench.report import Report, print_table, write_json
from jaxspec.bench.vllm_json import as_vllm
from jaxspec.errors import explained
from jaxspec.extras import install_hint, lacking

#: Command -> (module, help). A module has `add_arguments(parser)` and `run(args)`; its docstring is the description.
COMMANDS = {
    "offline": ("jaxspec.bench.offline", "throughput and latency of LLM.generate, all prompts submitted at once"),
    "serve": ("jaxspec.bench.serve", "load test of an OpenAI-compatible server"),
    "compare": ("jaxspec.bench.compare", "compare presets: their engines alternate in one process"),
    "constrained": ("jaxspec.bench.constrained", "cost of token masks, and accepted drafts under a schema"),
    "scheduler": ("jaxspec.bench.scheduler", "CPU time of scheduling decisions with many waiting requests"),
    "router": ("jaxspec.bench.router", "what routing and dispatching a request to a replica takes, without an engine"),
    "simulate": ("jaxspec.bench.simulate", "run the scheduler on a virtual clock, with a cost model for step times"),
    "record": ("jaxspec.bench.record", "record the engine and fit the simulator's cost and acceptance models"),
    "paper": ("jaxspec.bench.papers", "reproduce a paper's experiments, simulated and on the engine"),
    "orders": (
        "jaxspec.bench.papers.orders",
        "compare orders of requests over arrivals, loads and predictors, simulated and on the engine",
    ),
    "routing": ("jaxspec.bench.papers.routing", "compare routing policies from 1 to 1,000 replicas, simulated"),
    "simulate-gpu": ("jaxspec.bench.papers.gpu", "expected gain of drafts on a GPU, simulated"),
    "predictor": ("jaxspec.bench.papers.ssjf.predictor", "compare length predictors (SSJF's ablation)"),
    "chaos": ("jaxspec.bench.chaos", "serve random requests while parts of the engine fail, and check every answer"),
    "overload": ("jaxspec.bench.overload", "send a server several times its capacity, and see what it still delivers"),
    "profile": (
        "jaxspec.bench.profile",
        "show or renew the profile: measured step and draft times of this machine",
    ),
    "startup": ("jaxspec.bench.startup", "time from process start to the first token"),
    "kv": ("jaxspec.bench.kv", "quality of INT8 KV, and step time while pages are swapped"),
    "kernels": ("jaxspec.bench.kernels", "compare the native CPU kernels with XLA's operations"),
    "gpu": ("jaxspec.bench.gpu", "on an NVIDIA GPU: correctness, and step times against the roofline"),
    "fuzz": ("jaxspec.bench.fuzz", "mutated requests and files against the real server and its loaders"),
    "peers": ("jaxspec.bench.peers", "compare jaxspec with the servers of llama.cpp, vLLM on the CPU and transformers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Returns the exit code; argparse raises `SystemExit` with code 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen: ModuleType | None = None
    if argv is None:
        argv = sys.argv[1:]
    for name, (module, summary) in COMMANDS.items():
        asked = argv[:1] == [name]
        if not _installed(module):
            if asked:
                parser.error(f"{name} runs from a checkout of the repository; wheels don't contain the experiments")
            continue
        if asked:  # only this one is imported: others may need packages that are not there
            chosen = importlib.import_module(module)
        about = chosen.__doc__ if asked and chosen else None
        own = subparsers.add_parser(name, help=summary, description=about, allow_abbrev=False)
        if asked and chosen:
            chosen.add_arguments(own)
    args = parser.parse_args(argv)
    assert chosen is not None  # the parser refuses every other word
    try:
        check_outputs(args)
        report = chosen.run(args)
        return finish(report, args) if isinstance(report, Report) else report
    except (BenchError, OSError) as error:
        print(f"jaxspec.bench: {explained(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (message := lacking(error)) is None:
            raise
        print(f"jaxspec.bench: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxspec.bench: interrupted, nothing reported", file=sys.stderr)
        return 130


def _installed(module: str) -> bool:
    """Wheels leave out `jaxspec.bench.papers`."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_outputs(args: argparse.Namespace) -> None:
    """Check before a long run that its results can be written. Raises `BenchError` or OSError."""
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).touch()
    for name in ("plot", "timeline"):
        if getattr(args, name, None) and find_spec("matplotlib") is None:
            raise BenchError(f"--{name} needs matplotlib: {install_hint('bench')}")


def finish(report: Report, args: argparse.Namespace) -> int:
    """Print the report and write its files. Returns the exit code."""
    as_in_vllm = getattr(args, "json_format", None) == "vllm"
    content = as_vllm(report) if as_in_vllm else report.to_json()
    if as_in_vllm and not args.json:
        print(json.dumps(content))
    else:
        print_table(report)
    if args.json:
        write_json(args.json, content)
    if args.plot:
        from jaxspec.bench.plot import draw

        draw(report, args.plot)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
