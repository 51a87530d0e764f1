"""ALISE's comparison on the real engine: fewer and shorter requests, and a small KV pool."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.estimates import means, reduction
from jaxspec.bench.papers.alise.cases import System
from jaxspec.bench.papers.alise.report import DATA, VLLM
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import random_jobs, turns
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import Lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(
        parser.add_argument_group("with --engine"),
        ("--engine-jobs N", 100, "requests per turn"),
        ("--engine-tokens N", 70, "mean tokens of prompt and answer together; the data's lengths are scaled to it"),
        ("--engine-rate R", 18.0, "requests/s"),
        ("--engine-kv N", 480, "KV positions; requests longer than half of them are left out"),
    )


def measure(
    args: argparse.Namespace, tables: Mapping[str, Lengths], systems: Mapping[str, System], error: float
) -> dict[str, Any]:
    """Normalised latency in seconds per token and mean latency in seconds, `{data: {system: {metric: estimate}}}`, and
    their reductions relative to FCFS, over the turns.

    Fewer and shorter requests and a small pool, so that memory is as scarce as in the paper; KV at full precision.
    error: σ of the predictions' log-normal error. Raises `BenchError`.
    """
    repeats = args.repeats or 5
    settings = {
        "draft": [], "kv_cache_tokens": args.engine_kv, "enable_prefix_caching": False, **overrides(args),
    }  # fmt: skip
    presets = {name: _preset(system, error).but(**settings) for name, system in systems.items()}
    results: dict[str, Any] = {}
    with progress("turns", len(DATA) * len(presets) * (repeats + 1)) as advance:
        for data in DATA:
            table = scaled(tables[data], args.engine_tokens, args.engine_kv // 2)
            with engines(presets, args.model) as loaded:
                jobs = random_jobs(loaded, table, args.engine_jobs, args.engine_rate, args.seed)
                measured = turns(loaded, jobs, repeats, advance)
                preemptions = {name: llm.engine.stats().preemptions for name, llm in loaded.items()}
            by_turn = {name: [_metrics(turn) for turn in metrics] for name, metrics in measured.items()}
            results[data] = {
                name: {
                    "preemptions": preemptions[name],
                    "working_set": max(working_set(turn) for turn in measured[name]),
                    **means(own),
                    **{
                        f"{key} below": reduction([turn[key] for turn in own], [turn[key] for turn in by_turn[VLLM]])
                        for key in own[0]
                    },
                }
                for name, own in by_turn.items()
            }  # fmt: skip
    return {
        "jobs": args.engine_jobs, "tokens": args.engine_tokens, "rate": args.engine_rate, "kv": args.engine_kv,
        "turns": repeats, "systems": results,
    }  # fmt: skip


def _preset(system: System, error: float) -> Preset:
    """The system's preset, with predictions of this error if the simulated system has some."""
    if system.error is None:
        return system.preset
    return system.preset.but(predictor="noisy_oracle", predictor_noise=error)


def _metrics(turn: Sequence[RequestMetrics]) -> dict[str, float]:
    return {
        "normalised": float(np.mean([m.e2e / m.output_tokens for m in turn if m.e2e])),
        "jct": float(np.mean([m.e2e for m in turn if m.e2e])),
        "ttft": float(np.mean([m.ttft for m in turn if m.ttft])),
    }


def scaled(table: Lengths, tokens: int, longest: int) -> Lengths:
    """Lengths scaled to a mean of `tokens` for prompt and answer together, without requests longer than `longest`."""
    scale = tokens / (table.input + table.output).mean()
    inputs, outputs = (np.maximum(1, np.round(scale * column)).astype(int) for column in (table.input, table.output))
    fits = inputs + outputs <= longest
    return Lengths(inputs[fits], outputs[fits], table.predicted[fits])


def working_set(metrics: Sequence[RequestMetrics]) -> float:
    """Peak KV positions of all requests in the system, waiting ones included.

    Assumes that a request's tokens are evenly spaced between its first and its last.
    """
    done = [m for m in metrics if m.first_token is not None and m.finished is not None]
    first, last = (np.array([getattr(m, name) for m in done]) for name in ("first_token", "finished"))
    arrival, prompt, output = (
        np.array([getattr(m, name) for m in done]) for name in ("arrival", "prompt_tokens", "output_tokens")
    )
    return max(
        float((prompt + output * np.clip((t - first) / np.maximum(last - first, 1e-9), 0, 1))[present].sum())
        for t in last
        for present in [(arrival <= t) & (t <= last)]
    )
