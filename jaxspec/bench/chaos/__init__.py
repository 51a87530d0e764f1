"""Serve random requests on the real engine while parts of it fail, and check every answer.

Each scenario draws an engine (order, memory, batching, pace, tree, acceptance, drafters, which may be on a device of
their own, or two devices for everything) and faults: clients that cancel or whose callback fails, requests that make
their step fail, failures of planning, drafting, launching and reading a step, lost KV pools, jumps of the clock, late
and wrong predictions. Time passes on a clock of its own, so scenario I of a seed is the same on every machine: --seed S
--first I --scenarios 1 serves it again. The command makes two devices of a CPU; where JAX_NUM_CPU_DEVICES says 1, what
needs two is not drawn. Every answer is compared with that of the request served alone, without drafts and faults;
pages, host pages, penalty rows and states of requests are counted after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from jaxspec.bench import BenchError, options
from jaxspec.bench.reliability import commit, record
from jaxspec.bench.report import write_json
from jaxspec.paths import cache_folder
from jaxspec.progress import progress

if TYPE_CHECKING:
    from jaxspec.bench.chaos.driver import Answer
    from jaxspec.bench.chaos.scenario import Asked
    from jaxspec.models.load import LoadedModel

#: Different requests of a seed.
ASKED = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(
        parser, ("--scenarios N", 20, "scenarios"), ("--requests N", 250, "requests of each scenario")
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first scenario (default: 0)")
    parser.add_argument(
        "--live", type=options.positive, metavar="SECONDS",
        help="instead, let clients ask two servers over HTTP while these are stopped, killed and started again with a "
        "damaged cache, a full disk or little memory; not repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--ray", action="store_true",
        help="with --live: instead of two servers, replicas on a local Ray cluster, which are killed, stand still, and "
        "are replaced (extra ray)",
    )  # fmt: skip
    options.add_numbers(parser, ("--clients N", 16, "clients, with --live"))
    parser.add_argument("--verbose", action="store_true", help="log the failures that are injected")
    parser.add_argument("--json", metavar="FILE", help="write what happened")
    parser.add_argument(
        "--record", metavar="FOLDER", help="add it to reliability.json in this folder, and renew the page's tables"
    )


def run(args: argparse.Namespace) -> int:
    """Print what happened. Returns 1 if anything was wrong. Raises `BenchError`."""
    if args.ray and args.live is None:
        raise BenchError("--ray needs --live")
    if args.ray:
        import jaxspec.bench.chaos.ray_live  # noqa: F401  # a missing package shows before any work
    log = logging.getLogger("jaxspec")
    level = log.level
    if not args.verbose:
        log.setLevel(logging.CRITICAL)
    try:
        found = _found(args)
    finally:
        log.setLevel(level)
    for failure in found["failures"]:
        print(failure)
    print("; ".join(f"{name}: {found[name]}" for name in found if name != "failures"))
    kind = "replicas" if args.ray else "live" if args.live else "faults"
    runs = {kind: [found | {"commit": commit()}]}
    if args.json:
        write_json(args.json, runs)
    if args.record:
        record(runs, Path(args.record))
    return int(bool(found["failures"]))


def _found(args: argparse.Namespace) -> dict[str, Any]:
    """Serve what the options ask for. -> counts and failures."""
    # The programs of most scenarios are the same. Stored step times would be those of a real clock.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder("compiled-chaos")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    if args.live is None and "jax" not in sys.modules:  # it reads this when it is imported
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        model, pairs = _asked(args.seed, Path(folder) / "tiny")
        if args.live is not None:
            found = _live(args, Path(folder), pairs)
        else:
            found = serve(model, pairs, args.seed, args.first, args.scenarios, args.requests)
        found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def _asked(seed: int, folder: Path) -> tuple[LoadedModel, list[tuple[Asked, Answer]]]:
    """The model, written to a folder, and different requests of a seed with their answers."""
    from jaxspec.bench.chaos.driver import alone
    from jaxspec.bench.chaos.scenario import draw_asked
    from jaxspec.bench.fuzz.checkpoint import write_folder
    from jaxspec.models.load import load_model

    model = load_model(str(write_folder(folder)))
    random = Random(f"{seed}: requests")
    asked = [draw_asked(random, model.config.vocab_size - 2) for _ in range(ASKED)]
    return model, list(zip(asked, alone(model, asked), strict=True))


def serve(
    model: LoadedModel, pairs: Sequence[tuple[Asked, Answer]], seed: int, first: int, scenarios: int, requests: int
) -> dict[str, Any]:
    """Serve these scenarios of a seed. -> counts, and `failures`: what was wrong, in words."""
    import jax

    from jaxspec.bench.chaos.driver import Driver
    from jaxspec.bench.chaos.scenario import PLACEMENTS

    faults, ended, placed, failures = Counter[str](), Counter[str](), Counter[str](), list[str]()
    counts = dict.fromkeys(("turns", "tokens", "restarts"), 0)
    digest, memory = hashlib.sha256(), list[tuple[float, float]]()
    with progress("scenarios", scenarios) as advance:
        for i in range(first, first + scenarios):
            driver = Driver(model, pairs, Random(f"{seed}:{i}"), Random(f"{seed}:{i}: places"))
            placed.update(name for name in PLACEMENTS if driver.scenario.settings.get(name) is not None)
            done = driver.serve(requests)
            for name in counts:
                counts[name] += getattr(done, name)
            faults += done.faults
            ended += done.ended
            digest.update(done.digest.encode())
            memory.append(done.memory)
            again = f"python -m jaxspec.bench chaos --seed {seed} --first {i} --scenarios 1 --requests {requests}"
            failures += [f"{again}: {failure} ({driver.scenario})" for failure in done.failures]
            advance()
    return {
        "seed": seed, "first": first, "scenarios": scenarios, "requests": scenarios * requests, **counts,
        "devices": jax.device_count(), "placed": dict(placed),
        "faults": dict(sorted(faults.items())), "ended": dict(sorted(ended.items())),
        "digest": digest.hexdigest()[:16], "memory_mib": [round(m) for m in memory[-1]], "failures": failures,
    }  # fmt: skip


def _live(args: argparse.Namespace, folder: Path, pairs: Sequence[tuple[Asked, Answer]]) -> dict[str, Any]:
    if args.ray:
        from jaxspec.bench.chaos.ray_live import serve
    else:
        from jaxspec.bench.chaos.live import serve

    random = Random(f"{args.seed}: live")
    found = asyncio.run(serve(folder, folder / "tiny", pairs, random, args.live, args.clients))
    return {
        "seed": args.seed, "requests": found.requests, "faults": dict(sorted(found.faults.items())),
        "ended": dict(sorted(found.ended.items())), "ended_servers": dict(sorted(found.ended_servers.items())),
        "resumed": found.resumed, "failures": found.failures,
    }  # fmt: skip
