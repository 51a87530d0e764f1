"""Compare jaxspec with llama.cpp, vLLM on the CPU and transformers: OpenAI-compatible servers of the same model.

The speed of a machine varies more from minute to minute than engines differ. Therefore all servers stay loaded and take
turns, each stopped while another is measured. A turn that other processes or the hypervisor disturb is repeated; if it
stays disturbed, nothing is reported.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json
from jaxspec.progress import progress

if TYPE_CHECKING:
    from jaxspec.bench.peers.engines import Engine
    from jaxspec.bench.peers.server import Server

PEERS = ("llama.cpp", "vllm", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME",
        help=f"engines to compare with, of {', '.join(PEERS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--peers-folder", default=".peers", metavar="FOLDER",
        help="where `make bench-peers` installed them, each in a venv of its name (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", help="built-in name or .gguf file (default: smollm2-135m)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="setting of jaxspec's servers (docs/configuration.md); repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--scenarios", nargs="+", metavar="NAME",
        help="what to measure, of decode-1, decode-N, sample-1, sample-N (N: --streams), prefill-N (--prefill), loaded",
    )  # fmt: skip
    parser.add_argument("--baseline", default="jaxspec", metavar="NAME", help="server that ratios are relative to")
    options.add_numbers(
        parser,
        ("--threads N", 2, "CPU cores for each server"),
        ("--streams N", 16, "concurrent requests of decode-N and sample-N"),
        ("--max-tokens N", 128, "output tokens per request"),
        ("--repeats N", 5, "measured turns per server and scenario"),
        ("--retries N", 5, "repetitions of a disturbed turn"),
    )
    parser.add_argument(
        "--prefill", nargs="+", type=options.count, default=[1024, 4096], metavar="TOKENS",
        help="prompt lengths of the prefill scenarios (default: 1024 4096)",
    )  # fmt: skip
    parser.add_argument("--allow-disturbed", action="store_true", help="report disturbed turns too, and say so")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and orders (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write all measurements as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the comparison; 1 if the machine was disturbed. Raises `BenchError` if it cannot be made."""
    from jaxspec.bench.peers import engines, summary
    from jaxspec.bench.peers.scenarios import Prompts, scenarios
    from jaxspec.bench.peers.turns import Disturbed, Rules, alternate
    from jaxspec.models.load.gguf import GGUFFile

    gguf = gguf_file(args.model)
    tokenizer = GGUFFile(gguf).tokenizer()
    known = scenarios(args.streams, args.max_tokens, args.prefill)
    if unknown := set(args.scenarios or ()) - known.keys():
        raise BenchError(f"unknown scenario {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = {name: known[name] for name in args.scenarios or known}

    setup = engines.Setup.of(args, gguf)
    chosen, left_out = engines.chosen(args.peers, setup)
    # Servers are to be ended on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        servers, about = start(stack, chosen, args.threads, left_out)
        if args.baseline not in about:
            raise BenchError(f"no server {args.baseline}, the baseline; there are {', '.join(about) or 'none'}")
        rules = Rules(args.repeats, args.retries, args.allow_disturbed)
        measured = {}
        try:
            with progress("turns", len(wanted) * len(servers) * (args.repeats + 1)) as advance:
                for name, scenario in wanted.items():
                    made = Prompts(tokenizer)
                    measured[name] = alternate(name, scenario, servers, made, rules, args.seed, advance)
        except Disturbed as error:
            print(f"jaxspec.bench: {error}; nothing reported (--allow-disturbed reports it)", file=sys.stderr)
            return 1
        for engine, server in servers.items():
            about[engine.name]["final_bytes"] = server.resident_bytes()
    found = summary.summarise(wanted, measured, args.baseline, tokenizer)
    if args.json:
        head = {"kind": "peers", "machine": machine(), "options": options.plain(args)}
        write_json(args.json, {**head, "servers": about, "left_out": left_out, **found})
    summary.show(found, about, left_out)
    return 0


def gguf_file(model: str | None) -> Path:
    """The model's GGUF file. Raises `BenchError`."""
    from jaxspec.models.load import DEFAULT_MODEL, ModelLoadError
    from jaxspec.models.load.registry import TABLE, fetch

    model = model or DEFAULT_MODEL
    try:
        path = fetch(TABLE[model]) if model in TABLE else Path(model).expanduser().resolve()
    except ModelLoadError as error:
        raise BenchError(str(error)) from None
    if path.suffix != ".gguf" or not path.is_file():
        raise BenchError(f"{path} is no .gguf file, which llama.cpp needs")
    return path


def start(
    stack: ExitStack, engines: Sequence[Engine], threads: int, left_out: dict[str, str]
) -> tuple[dict[Engine, Server], dict[str, dict[str, Any]]]:
    """Start the servers one after another, and stop each when it has loaded. Those that do not start are added to
    `left_out` with the reason. Returns the servers, and what is known of them by name."""
    from jaxspec.bench.peers.server import Server

    servers, about = {}, {}
    with progress("servers", len(engines)) as advance:
        for engine in engines:
            try:
                server = stack.enter_context(Server(engine.name, engine.command, engine.env, threads))
            except BenchError as error:
                left_out[engine.name] = str(error)
            else:
                servers[engine] = server
                about[engine.name] = {
                    "version": engine.version, "command": server.command, "ready_s": server.ready_s,
                    "loaded_bytes": server.resident_bytes(),
                }  # fmt: skip
                server.suspend()
            advance()
    return servers, about
