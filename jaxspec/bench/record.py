"""Run a workload on the engine and record scheduler events, step times and draft acceptance for the simulator.

jaxspec.bench simulate reads the file of --profile with its option --cost, and that of --acceptance with --acceptance.
--json writes the recording itself.
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
    options.add_engine(parser)
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--num-prompts", type=options.count, default=32, metavar="N", help="number of requests (default: 32)"
    )
    work.add_argument(
        "--max-tokens", type=options.count, default=128, metavar="N",
        help="maximum output tokens per request (default: 128)",
    )  # fmt: skip
    work.add_argument(
        "--request-rate", type=options.positive, metavar="R",
        help="mean requests per second, Poisson arrivals (default: all at once)",
    )  # fmt: skip
    work.add_argument("--prompts", metavar="JSONL", help=f"{options.PROMPTS_HELP} (default: built-in prompts)")
    work.add_argument("--input-tokens", type=options.span, metavar="N|LOW:HIGH", help=options.INPUT_TOKENS_HELP)
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    work.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")
    work.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals (default: 0)")
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write the recording: every request and step")
    results.add_argument("--profile", metavar="FILE", help="write a cost model fitted to the steps")
    results.add_argument("--acceptance", metavar="FILE", help="write an acceptance process fitted to the drafts")


def run(args: argparse.Namespace) -> int:
    """Print and write the recording and the fitted models. Raises `BenchError` if nothing can be recorded."""
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
        recorder = Recorder(engine.loop.scheduler)
        with progress("requests", len(ids)) as advance:
            drive(engine, [a.time for a in times], ids, [params] * len(ids), advance)
        recording = recorder.stop()
        about = f"{engine.model_name} on {machine()['processor']}, {machine()['cores']} cores"
        sizes = [shape.tokens for shape in engine.loop.model_runner.shapes]
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
    console.print(
        f"step time in ms by step size in tokens: {steps}; per draft level: {1e3 * profile.draft_level:.2f} ms"
    )
    if process is not None:
        console.print(f"acceptance: {process}")
    return 0


def took(recording: Recording) -> list[float]:
    """Seconds of each step, including planning and processing of the results, without waiting for requests, nor for the
    step before if they overlap."""
    before = [float("-inf"), *(step.ended for step in recording.steps)]
    return [step.ended - max(step.begun, end) for step, end in zip(recording.steps, before, strict=False)]


def drive(
    engine: Engine,
    times: Sequence[float],
    ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    expected: Sequence[int] | None = None,
    end_as_expected: bool = False,
    slos: Sequence[Slo] | None = None,
    answers: Sequence[list[int]] | None = None,
) -> list[RequestMetrics]:
    """Submit request i at `times[i]`, in seconds from now, and wait for all. Returns their metrics in the same order.

    `expected`: output tokens of each request, for the length oracle, which defaults to the request's `max_tokens`. With
    `end_as_expected` the answers also end there. `slos`: SLO of each request. `answers`: a list for each, which
    gets its output tokens. Raises `BenchError` if the engine fails.
    """
    metrics: list[RequestMetrics | None] = [None] * len(ids)
    finished = threading.Semaphore(0)

    def listener(i: int) -> Callable[[OutputDelta], None]:
        def on_output(delta: OutputDelta) -> None:
            if answers is not None:
                answers[i].extend(delta.token_ids)
            if delta.finish_reason is not None:
                metrics[i] = delta.metrics if delta.error is None else None
                finished.release()

        return on_output

    begin = clock()
    try:
        for i, at in enumerate(times):
            if (wait := begin + at - clock()) > 0:
                time.sleep(wait)
            length, slo = expected[i] if expected else None, slos[i] if slos else None
            engine.submit(
                ids[i], params[i], listener(i), expected_tokens=length, end_as_expected=end_as_expected, slo=slo
            )
    except (ValueError, RuntimeError) as error:
        raise BenchError(str(error)) from None
    for _ in ids:
        finished.acquire()
        advance()
    succeeded = [m for m in metrics if m is not None]
    if len(succeeded) < len(ids):
        raise BenchError(engine.failure or f"{len(ids) - len(succeeded)} requests failed")
    return succeeded
