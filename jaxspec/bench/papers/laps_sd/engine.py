"""LAPS-SD's comparison on the real engine: real prompts with real drafts, answered to EOS."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench import options, prompts
from jaxspec.bench.estimates import Estimate, estimate, ratio, reduction
from jaxspec.bench.papers.laps_sd.cases import DRAFTS, QUANTUM_MS, SIGMA
from jaxspec.bench.papers.laps_sd.report import LAS, LP_SJF, MIXED
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import answered, mean_jct, to_eos, turns
from jaxspec.bench.papers.variants import Variants
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sched.sim.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --engine")
    options.add_numbers(
        group, ("--engine-jobs N", 32, "requests of all kinds mixed"),
        ("--engine-tokens N", 256, "max_tokens of the requests"),
        ("--engine-sigma X", SIGMA, "log-normal error of the predicted lengths"),
    )  # fmt: skip
    group.add_argument(
        "--engine-each", type=int, default=20, metavar="N", help="requests of each kind alone; 0: none (default: 20)"
    )
    group.add_argument(
        "--engine-draft", default="ngram", metavar="D", help="the drafter, e.g. smollm2-eagle (default: ngram)"
    )


def measure(
    args: argparse.Namespace, systems: Mapping[str, Preset], texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Mean latencies and times to first token in seconds, and reductions in per cent, with intervals over the turns.

    `systems: {data: {order: {jct, ttft: mean; other orders: {jct: reduction, ttft, throughput: ratio}}}}`:
    `--engine-jobs` requests of all kinds of `texts` mixed, and `--engine-each` of each kind alone. All arrive at once
    and are answered to EOS or `--engine-tokens`. A run before each turn gives the answers' lengths, which the predictor
    sees with an error.
    """
    from jaxspec.models.load.tokenizer import chat_ids

    repeats = args.repeats or 5
    each: int = args.engine_each
    counts: dict[str, int] = {MIXED: args.engine_jobs, **(dict.fromkeys(texts, each) if each > 0 else {})}
    common = {
        "max_num_seqs": 1, "draft": [args.engine_draft], "tree": "chain", "draft_depth": DRAFTS,
        "las": {"quantum_ms": QUANTUM_MS}, "enable_prefix_caching": False,  # only the first serves prompts beforehand
    }  # fmt: skip
    given = overrides(args)
    noise = {"predictor": "noisy_oracle", "predictor_noise": args.engine_sigma}
    presets = {
        name: Preset(preset.name, {**common, **(noise if preset.load().predictor != "none" else {}), **preset.changes})
        for name, preset in Variants.of(args).apply(systems).items()
    }
    presets = {name: preset.but(**given) for name, preset in presets.items()}
    results: dict[str, Any] = {}
    with (
        progress("turns", len(counts) * len(presets) * (repeats + 1)) as advance,
        engines(presets, args.model) as loaded,
    ):
        first = next(iter(loaded.values()))  # FCFS: it predicts nothing, so all predictors make the same errors
        for name, count in counts.items():

            def workload(repeat: int, kind: str = name, count: int = count) -> tuple[Workload, list[list[int]]]:
                rng = np.random.default_rng([args.seed, repeat])
                kinds = list(texts) if kind == MIXED else [kind]
                drawn = [kinds[i % len(kinds)] for i in range(count)]
                rng.shuffle(drawn)
                ids = [chat_ids(first.tokenizer, prompts.choose(texts[k], 1, rng)[0]) for k in drawn]
                return answered(first, np.zeros(count), ids, args.engine_tokens), ids

            results[name] = compared(turns(loaded, workload, repeats, advance, to_eos))
    return {
        "requests": counts, "turns": repeats, "max_tokens": args.engine_tokens, "sigma": args.engine_sigma,
        "draft": args.engine_draft, "systems": results,
    }  # fmt: skip


def compared(measured: Mapping[str, Sequence[Sequence[RequestMetrics]]]) -> dict[str, Any]:
    """See `measure`: one data set."""
    jct = {name: [mean_jct(turn) for turn in found] for name, found in measured.items()}
    ttft = {name: [_mean([m.ttft for m in turn]) for turn in found] for name, found in measured.items()}
    end = {name: [max(m.e2e or 0.0 for m in turn) for turn in found] for name, found in measured.items()}
    out: dict[str, Any] = {}
    for name in measured:
        own: dict[str, dict[str, Estimate | None] | Estimate | None]
        out[name] = own = {"jct": estimate(jct[name]), "ttft": estimate(ttft[name])}
        for base in (next(iter(measured)), LP_SJF, LAS):
            if base != name and base in measured:
                own[base] = {
                    "jct": reduction(jct[name], jct[base]), "ttft": ratio(ttft[name], ttft[base]),
                    "throughput": ratio(end[base], end[name]),  # all requests arrive at once
                }  # fmt: skip
    return out


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean([v for v in values if v is not None]))
