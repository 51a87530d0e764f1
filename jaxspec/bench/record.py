"""Record the engine at work: its scheduler's events, the times of its steps and what became of its drafts.

The simulator takes the results: --profile as its --cost, --acceptance as its --acceptance; --json keeps the recording.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.offline import load_llm, tokenise
from jaxspec.bench.report import machine
from jaxspec.errors import explained
from jaxspec.outputs import OutputDelta, RequestMetrics
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import fit
from jaxspec.sched.sim.cost import Profiled
from jaxspec.sched.sim.recording import Recorder, Recording
from jaxspec.sched.slo import Slo

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="a built-in name, a Hugging Face folder, a .gguf file or a hub id")
    engine.add_argument("--draft", action="append", default=[], metavar="D", help="as of the server; none: no drafter")
    engine.add_argument("--config", metavar="YAML", help="a preset, as configs/default.yaml")
    engine.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    scheduled = parser.add_argument_group("workload")
    scheduled.add_argument("--num-prompts", type=options.count, default=32, metavar="N", help="default: 32")
    scheduled.add_argument("--max-tokens", type=options.count, default=128, metavar="N", help="default: 128")
    scheduled.add_argument("--request-rate", type=options.positive, metavar="R", help="a second (default: all at once)")
    scheduled.add_argument(
        "--prompts", metavar="JSONL", help='a file of {"turns": [text, ...]} (default: built-in ones)'
    )
    scheduled.add_argument("--input-tokens", type=options.span, metavar="N|LOW:HIGH", help="prompts of this length")
    scheduled.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    scheduled.add_argument("--ignore-eos", action="store_true", help="always write --max-tokens tokens")
    scheduled.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="the recording: every request and step")
    results.add_argument("--profile", metavar="FILE", help="the cost model of this engine")
    results.add_argument("--acceptance", metavar="FILE", help="the acceptance process of its drafts")


def run(args: argparse.Namespace) -> int:
    """Prints and writes what was recorded. Raises `BenchError` where nothing can be."""
    rng = np.random.default_rng(args.seed)
    try:
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    with load_llm(args) as llm:
        engine = llm.engine
        ids = tokenise(engine.tokenizer, texts, args, rng)
        times = arrivals.gamma(len(ids), args.request_rate, 1.0, rng) if args.request_rate else arrivals.burst(len(ids))
        recorder = Recorder(engine._scheduler)  # the only one who looks in: a benchmark is no reason for an interface
        with progress("requests", len(ids)) as advance:
            drive(engine, [a.time for a in times], ids, [params] * len(ids), advance)
        recording = recorder.stop()
        about = f"{engine.model_name} on {machine()['processor']}, {machine()['cores']} cores"
        sizes = [shape.tokens for shape in engine._model_runner.shapes]
    try:
        profile = Profiled.fit([s.load for s in recording.steps], took(recording), sizes, about)
        process = fit(recording.traces()) if args.acceptance else None
    except ValueError as error:
        raise BenchError(str(error)) from None
    if args.json:
        recording.save(args.json)
    if args.profile:
        profile.save(args.profile)
    if process is not None:
        process.save(args.acceptance)
    steps = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in zip(profile.buckets, profile.step, strict=True))
    console = Console()
    console.print(f"{len(recording.requests)} requests, {len(recording.steps)} steps; {about}")
    console.print(f"milliseconds of a step by its tokens: {steps}; of a draft level: {1e3 * profile.draft_level:.2f}")
    if process is not None:
        console.print(f"acceptance: {process}")
    return 0


def took(recording: Recording) -> list[float]:
    """Seconds of each step, planning and taking in included, without waiting for requests."""
    return [step.ended - step.begun for step in recording.steps]


def drive(
    engine: Engine,
    times: Sequence[float],
    ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    expected: Sequence[int] | None = None,
    slos: Sequence[Slo] | None = None,
) -> list[RequestMetrics]:
    """Submits each request at its time, in seconds from now; -> their metrics, in the same order, when all have ended.

    `expected`: output tokens of each, for an oracle; where it is not given oracles take the limit for the length.
    `slos`: latency targets of each.
    Raises `BenchError` when the engine fails.
    """
    metrics: list[RequestMetrics | None] = [None] * len(ids)
    left = threading.Semaphore(0)

    def listener(i: int) -> Callable[[OutputDelta], None]:
        def take(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                metrics[i] = delta.metrics if delta.error is None else None
                left.release()

        return take

    begin = clock()
    try:
        for i, at in enumerate(times):
            if (wait := begin + at - clock()) > 0:
                time.sleep(wait)
            length, slo = expected[i] if expected else None, slos[i] if slos else None
            engine.submit(ids[i], params[i], listener(i), expected_tokens=length, slo=slo)
    except (ValueError, RuntimeError) as error:
        raise BenchError(str(error)) from None
    for _ in ids:
        left.acquire()
        advance()
    done = [m for m in metrics if m is not None]
    if len(done) < len(ids):
        raise BenchError(engine.failure or f"the engine gave up {len(ids) - len(done)} requests")
    return done
