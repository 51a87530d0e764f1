"""Serve random requests on the real engine while parts of it fail, and check every answer.

Each scenario draws an engine (order, memory, batching, pace, tree, acceptance, drafters) and faults: clients that cancel
or whose callback fails, requests that make their step fail, failures of planning, drafting, launching and reading a
step, lost KV pools, jumps of the clock, late and wrong predictions. Time passes on a clock of its own, so scenario I of
a seed is the same everywhere: --seed S --first I --scenarios 1 serves it again. Every answer is compared with that of
the request served alone, without drafts and faults; pages, host pages, penalty rows and states of requests are counted
after each step.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from jaxspec.bench import options
from jaxspec.bench.report import write_json
from jaxspec.paths import cache_folder
from jaxspec.progress import progress

#: Different requests of a seed.
ASKED = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(
        parser, ("--scenarios N", 20, "scenarios"), ("--requests N", 250, "requests of each scenario")
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of everything (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first scenario (default: 0)")
    parser.add_argument("--verbose", action="store_true", help="log the failures that are injected")
    parser.add_argument("--json", metavar="FILE", help="write what happened")


def run(args: argparse.Namespace) -> int:
    """Print what happened. Returns 1 if anything was wrong."""
    if not args.verbose:
        logging.getLogger("jaxspec").setLevel(logging.CRITICAL)
    # The programs of most scenarios are the same. Stored step times would be those of a real clock.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder("compiled-chaos")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    found = serve(args.seed, args.first, args.scenarios, args.requests)
    for failure in found["failures"]:
        print(failure)
    print("; ".join(f"{name}: {found[name]}" for name in found if name != "failures"))
    if args.json:
        write_json(args.json, {"faults": [found]})
    return int(bool(found["failures"]))


def serve(seed: int, first: int, scenarios: int, requests: int) -> dict[str, Any]:
    """Serve these scenarios of a seed. -> counts, and `failures`: what was wrong, in words."""
    from jaxspec.bench.chaos.driver import Driver, alone
    from jaxspec.bench.chaos.scenario import draw_asked
    from jaxspec.bench.fuzz.checkpoint import write_folder
    from jaxspec.models.load import load_model

    begun = time.monotonic()
    faults, ended, failures = Counter[str](), Counter[str](), list[str]()
    counts = dict.fromkeys(("turns", "tokens", "restarts"), 0)
    digests: list[str] = []
    with tempfile.TemporaryDirectory() as folder, progress("scenarios", scenarios) as advance:
        model = load_model(str(write_folder(Path(folder) / "tiny")))
        random = Random(f"{seed}: requests")
        asked = [draw_asked(random, model.config.vocab_size - 2) for _ in range(ASKED)]
        pairs = list(zip(asked, alone(model, asked), strict=True))
        for i in range(first, first + scenarios):
            driver = Driver(model, pairs, Random(f"{seed}:{i}"))
            done = driver.serve(requests)
            for name in counts:
                counts[name] += getattr(done, name)
            faults += done.faults
            ended += done.ended
            digests.append(done.digest)
            again = f"python -m jaxspec.bench chaos --seed {seed} --first {i} --scenarios 1 --requests {requests}"
            failures += [f"{again}: {failure} ({driver.scenario})" for failure in done.failures]
            advance()
    return {
        "seed": seed, "first": first, "scenarios": scenarios, "requests": scenarios * requests, **counts,
        "faults": dict(sorted(faults.items())), "ended": dict(sorted(ended.items())), "digests": digests[:1],
        "seconds": round(time.monotonic() - begun, 1), "failures": failures,
    }  # fmt: skip
