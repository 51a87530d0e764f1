"""Send mutated requests to the real server with a tiny model, and give mutated files to the loaders.

Everything is made from --seed: body I of a seed is the same on every machine, and a failing one is printed with the
command that sends it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxspec.bench import options
from jaxspec.bench.reliability import commit, record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bodies", type=int, default=0, metavar="N", help="request bodies to send (default: 0)")
    parser.add_argument("--files", type=int, default=0, metavar="N", help="files to load (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all mutations (default: %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="I", help="number of the first body or file (default: 0)"
    )
    parser.add_argument(
        "--socket", action="store_true", help="over a socket: slow bodies and wrong lengths too, an order slower"
    )
    options.add_numbers(
        parser,
        ("--probe-every N", 500, "bodies between two checks of the engine"),
        ("--concurrency N", 8, "bodies at a time"),
        ("--seconds S", 60.0, "for one answer or one file"),
        ("--growth-mib N", 1024, "growth of the server's memory that is a failure"),
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine setting; repeatable")
    parser.add_argument("--json", metavar="FILE", help="write what was sent and found")
    parser.add_argument(
        "--record", metavar="FOLDER", help="add it to reliability.json in this folder, and renew the page's tables"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 1 if anything failed."""
    found: dict[str, list[dict[str, Any]]] = {"bodies": [], "files": []}
    if args.bodies:
        found["bodies"].append(_bodies(args))
    if args.files:
        found["files"].append(_files(args))
    for run in (*found["bodies"], *found["files"]):
        run["commit"] = commit()
    if args.record:
        record(found, Path(args.record))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(run["failures"] for runs in found.values() for run in runs))


def _again(args: argparse.Namespace, index: int, what: str) -> str:
    socket = " --socket" if args.socket and what == "bodies" else ""
    return f"python -m jaxspec.bench fuzz --seed {args.seed} --first {index} --{what} 1{socket}"


def _bodies(args: argparse.Namespace) -> dict[str, Any]:
    from jaxspec.bench.fuzz.server import InProcess, OverSocket, application, engine
    from jaxspec.bench.fuzz.sweep import Failure, Limits, Sweep, summary

    def tell(failure: Failure) -> None:
        print(f"FAILED: {failure.what}\n  {failure.body}\n  {_again(args, failure.index, 'bodies')}", flush=True)

    async def sweep() -> dict[str, Any]:
        limits = Limits(args.seconds, args.growth_mib << 20, args.probe_every, args.concurrency)
        async with (OverSocket if args.socket else InProcess).running(application(started)) as sender:
            began = time.monotonic()
            outcome = await Sweep(started, sender, args.seed, limits, tell).run(args.first, args.bodies)
        seconds = {"socket": args.socket, "seconds": round(time.monotonic() - began, 1)}
        return summary(outcome, args.seed, args.first, args.bodies) | seconds

    with tempfile.TemporaryDirectory() as folder:
        started = engine(Path(folder), args.set)
        started.start()
        try:
            found = asyncio.run(sweep())
        finally:
            started.shutdown()
    shown = ", ".join(f"{status}: {n}" for status, n in found["statuses"].items())
    print(f"{args.bodies} bodies in {found['seconds']} s; {shown}; {len(found['failures'])} failures", file=sys.stderr)
    return found


def _files(args: argparse.Namespace) -> dict[str, Any]:
    from jaxspec.bench.fuzz.file_sweep import sweep

    def tell(index: int, what: str) -> None:
        print(f"FAILED: {what}\n  {_again(args, index, 'files')}", flush=True)

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = sweep(Path(folder), args.seed, args.first, args.files, args.seconds, tell)
    found["seconds"] = round(time.monotonic() - began, 1)
    print(f"{args.files} files in {found['seconds']} s, {len(found['failures'])} failures", file=sys.stderr)
    return found
