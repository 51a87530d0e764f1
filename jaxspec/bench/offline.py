"""Measure throughput and latency of LLM.generate, with all prompts submitted at once."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.report import Distribution, Report, Sample, summarise
from jaxspec.engine.metrics import EngineStats
from jaxspec.errors import explained
from jaxspec.outputs import RequestOutput
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.models.load.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = options.add_engine(parser)
    options.add_numbers(engine, ("--repeats N", 1, "number of runs; the one with median throughput is reported"))
    options.add_workload(parser)


def run(args: argparse.Namespace) -> Report:
    """The report of the run with median throughput. Raises `BenchError` if nothing can be measured."""
    rng = np.random.default_rng(args.seed)
    try:
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, seed=args.seed
        )
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None

    begin = time.perf_counter()
    llm = load_llm(args)
    startup_s = time.perf_counter() - begin
    ids = tokenise(llm.engine.tokenizer, texts, args, rng)
    gaps: list[float] = []
    llm.engine.token_observers.append(lambda seconds, count: gaps.extend([seconds] * count))

    reports = []
    with progress("runs", args.repeats) as advance:
        for _ in range(args.repeats):
            gaps.clear()
            llm.engine.reset_stats()
            before = llm.engine.stats()
            begin = time.perf_counter()
            try:
                outputs = llm.generate(ids, params)
            except (ValueError, RuntimeError) as error:
                raise BenchError(str(error)) from None
            duration = time.perf_counter() - begin
            first = min(output.metrics.arrival for output in outputs)
            samples = [to_sample(output, first) for output in outputs]
            report = summarise("offline", samples, duration, options=options.plain(args), slo=options.slo(args))
            report.itl_ms = Distribution.of(gaps)
            add_engine_numbers(report, before, llm.engine.stats())
            reports.append(report)
            advance()
    llm.close()

    runs = [report.output_tokens_per_s for report in reports]
    report = reports[int(np.argsort(runs)[len(runs) // 2])]
    report.extra |= {"model": llm.engine.model_name, "startup_s": startup_s, "output_tokens_per_s_of_all_runs": runs}
    return report


def load_llm(args: argparse.Namespace) -> LLM:
    """The engine configured by the options of `options.add_engine`. Raises `BenchError`."""
    from jaxspec.config import EngineConfig
    from jaxspec.llm import LLM

    try:
        overrides = options.overrides(args)
        EngineConfig.load(args.config, **overrides)  # rejects names that are parameters of `LLM` but not settings
        return LLM(config=args.config, **{**options.COMPILE_ALL_FIRST, **overrides})
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None


def tokenise(
    tokenizer: Tokenizer, texts: list[str], args: argparse.Namespace, rng: np.random.Generator
) -> list[list[int]]:
    """Token ids of `--num-prompts` prompts: texts in the model's chat template, or plain text of `--input-tokens`."""
    if args.input_tokens:
        low, high = args.input_tokens
        plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        sizes = rng.integers(low, high + 1, size=args.num_prompts)
        return [prompts.of_tokens(plain, int(size), int(rng.integers(len(plain)))) for size in sizes]
    from jaxspec.models.load.tokenizer import chat_ids

    chosen = prompts.choose(texts, args.num_prompts, rng)
    return [chat_ids(tokenizer, text) for text in chosen]


def to_sample(output: RequestOutput, begin: float) -> Sample:
    """The sample of a request, with times of the engine's clock; `begin` is the start of the run on that clock."""
    metrics, answer = output.metrics, output.outputs[0]
    return Sample(
        start=metrics.arrival - begin,
        ttft=metrics.ttft,
        tpot=metrics.tpot,
        e2e=metrics.e2e,
        input_tokens=len(output.prompt_token_ids),
        output_tokens=len(answer.token_ids),
        finish_reason=answer.finish_reason,
        error="the engine aborted the request" if answer.finish_reason in ("error", "abort") else None,
    )


def add_engine_numbers(report: Report, before: EngineStats, after: EngineStats) -> None:
    """Add the engine's counters to the report.

    `before` was taken right after `reset_stats`, which zeroes the counters of steps, tokens and time; the remaining
    counters are reported as differences.
    """
    report.host_overhead_fraction = after.host_seconds / after.step_seconds if after.step_seconds else None
    report.padding_fraction = after.padded_fraction
    report.token_padding_fraction = after.token_padded_fraction
    report.compilations_after_warmup = after.compilations_after_warmup
    report.peak_memory_bytes = after.peak_memory_bytes
    if after.draft_tokens:
        report.acceptance_rate = after.accepted_tokens / after.draft_tokens
        report.mean_accepted_length = 1 + after.accepted_tokens / after.verifications
    if after.predictions.made and after.step_seconds:
        seconds = after.predictions.seconds - before.predictions.seconds
        report.extra["prediction_seconds_per_step_second"] = seconds / after.step_seconds
    report.extra |= {
        "steps": after.steps,
        "preemptions": after.preemptions - before.preemptions,
        "swaps": after.swaps - before.swaps,
        "prefix_hit_tokens": after.prefix_hits - before.prefix_hits,
    }
