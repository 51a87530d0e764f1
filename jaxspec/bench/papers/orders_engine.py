"""Orders of requests on the engine: real prompts, sampled answers, and what the shipped predictor and probe say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.estimates import estimate, interval, ratio
from jaxspec.bench.papers.presets import Preset, engines
from jaxspec.bench.papers.serving import mean_jct
from jaxspec.bench.record import drive
from jaxspec.bench.table import TIMES, Column, markdown
from jaxspec.config import ConfigError
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

SLOTS, TEMPERATURE = 4, 0.8
FCFS = "fcfs, none"
_PREDICTED = {"draft": [], "predictor": "proxy", "length_probe": None, "aging_ms": None}
_KNOWN = _PREDICTED | {"predictor": "oracle"}
#: "order, predictor" -> its settings. No drafts, no aging: the orders alone differ.
CONTENDERS: Mapping[str, Preset] = {
    FCFS: Preset("fcfs"),
    "sjf, proxy": Preset("ssjf").but(**_PREDICTED),
    "srpt, probe": Preset("srpt").but(**_PREDICTED | {"length_probe": "auto"}),
    "gittins, probe": Preset("gittins").but(**_PREDICTED | {"length_probe": "auto"}),
    "boost, proxy": Preset("boost").but(**_PREDICTED),
    "sjf, oracle": Preset("ssjf").but(**_KNOWN),
    "gittins, oracle": Preset("gittins").but(**_KNOWN),
}


@dataclass(frozen=True, slots=True)
class Work:
    """`jobs` requests per turn to prompts of the file `answers`, of at most `cap` output tokens, at `load` times the
    rate at which the engine serves all of them at once."""

    answers: str
    jobs: int
    load: float
    cap: int
    turns: int
    seed: int


def measure(work: Work, model: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Serve the same requests in every order, turn by turn, after a turn for warm-up in which orders learn how
    predictions turn out. `settings`: of all engines, where contenders do not differ in them. Raises `BenchError`."""
    limits = {
        "max_num_seqs": SLOTS, "kv_cache_tokens": 16_384, "enable_prefix_caching": False,
        "max_queued_requests": 4096, **settings,
    }  # fmt: skip
    presets = {name: Preset(one.name, {**limits, **one.changes}) for name, one in CONTENDERS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in presets}
    rng, other = np.random.default_rng(work.seed), 0
    prompts = held_out(work, model, limits.get("max_model_len"))
    order = rng.permutation(len(prompts))[: work.jobs * (work.turns + 1)]
    prompts = [prompts[i] for i in order]
    with engines(presets, model) as loaded, progress("turns", len(presets) * (work.turns + 1) + 1) as advance:
        first = next(iter(loaded.values()))
        lengths, seconds = _answered(first.engine, prompts, work)
        rate = work.load * len(prompts) / seconds
        advance()
        names = list(loaded)
        for turn in range(work.turns + 1):
            rows = [i % len(prompts) for i in range(turn * work.jobs, (turn + 1) * work.jobs)]
            at = [a.time for a in arrivals.poisson(work.jobs, rate, rng)]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                measured, changed = _serve(loaded[name].engine, at, prompts, rows, lengths, work)
                other += changed
                if turn:
                    found[name].append(measured)
                advance()
        slots = first.engine.config.max_num_seqs
    return {
        "jobs": work.jobs, "turns": work.turns, "cap": work.cap, "load": work.load, "slots": slots, "rate": rate,
        "mean output": float(np.mean(lengths)), "answers of another length": other, "cells": summary(found),
    }  # fmt: skip


def held_out(work: Work, model: str | None, max_model_len: int | None) -> list[list[int]]:
    """Token ids of the prompts in a file of `jaxspec.train_predictor.collect` that predictors hold out as their test
    part, each once, if their answers fit. Raises `BenchError`."""
    from jaxspec.models.load import ModelLoadError, load_model
    from jaxspec.models.load.registry import DEFAULT_MODEL
    from jaxspec.train_predictor.probe import held_out_rows

    try:
        target = load_model(model or DEFAULT_MODEL)
        rows = held_out_rows([work.answers], target)
    except (OSError, ModelLoadError, ConfigError) as error:
        raise BenchError(f"--engine: {str(error).removeprefix('data: ')}") from None
    kept = dict.fromkeys(tuple(row.prompt) for row in rows)
    longest = min(max_model_len or target.config.max_position, target.config.max_position) - work.cap
    prompts = [list(ids) for ids in kept if len(ids) <= longest]
    if len(prompts) < work.jobs:
        raise BenchError(
            f"--engine: {len(prompts)} prompts of the test part with room for an answer are too few for {work.jobs}"
        )
    return prompts


def _params(rows: Sequence[int], work: Work) -> list[SamplingParams]:
    """Each prompt's answer depends on its seed alone, so all orders and turns give the same."""
    return [SamplingParams(temperature=TEMPERATURE, max_tokens=work.cap, seed=work.seed + row) for row in rows]


def _answered(engine: Engine, prompts: Sequence[Sequence[int]], work: Work) -> tuple[list[int], float]:
    """Tokens of every prompt's answer, and the seconds that all of them take together."""
    metrics = drive(engine, [0.0] * len(prompts), prompts, _params(range(len(prompts)), work))
    ends = [m.arrival + m.e2e for m in metrics if m.e2e is not None]
    return [m.output_tokens for m in metrics], max(ends) - min(m.arrival for m in metrics)


def _serve(
    engine: Engine, at: Sequence[float], prompts: Sequence[Sequence[int]], rows: Sequence[int],
    lengths: Sequence[int], work: Work,
) -> tuple[dict[str, float], int]:  # fmt: skip
    """Serve the prompts `rows` at these seconds. -> JCT and TTFT in seconds, preemptions per request, and the seconds
    of predictor and probe relative to those of all steps; and the number of answers that are not as long as expected.
    """
    engine.reset_stats()
    before = engine.stats()
    expected = [lengths[i] for i in rows]
    metrics = drive(engine, at, [prompts[i] for i in rows], _params(rows, work), expected=expected)
    after = engine.stats()
    jct = [m.e2e for m in metrics if m.e2e is not None]
    stopped = after.preemptions - before.preemptions + after.pauses - before.pauses
    return {
        "mean": mean_jct(metrics), "p95": float(np.quantile(jct, 0.95)),
        "ttft": float(np.mean([m.ttft for m in metrics if m.ttft is not None])), "preemptions": stopped / len(rows),
        "predicting": (after.predictions.seconds - before.predictions.seconds) / after.step_seconds,
        "probing": (after.predicted_again_seconds - before.predicted_again_seconds) / after.step_seconds,
    }, sum(m.output_tokens != n for m, n in zip(metrics, expected, strict=True))  # fmt: skip


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A row per contender: estimates over the turns; times relative to FCFS in the same turn."""
    rows = []
    for name, turns in found.items():
        order, predictor = name.split(", ")
        relative = {m: ratio([t[m] for t in turns], [t[m] for t in found[FCFS]]) for m in ("mean", "p95", "ttft")}
        absolute = {m: estimate([t[m] for t in turns]) for m in ("preemptions", "predicting", "probing")}
        rows.append({"order": order, "predictor": predictor, **relative, **absolute})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page's table of `summary`'s rows."""
    columns: list[Column] = [
        ("order", "{}", "order"), ("predictor", "{}", "predictor"), ("mean JCT", interval(TIMES), "mean"),
        ("95 % quantile", interval(TIMES), "p95"), ("TTFT", interval(TIMES), "ttft"),
        ("preemptions per request", interval("{:.2f}", 0), "preemptions"),
        ("seconds of the predictor per second of steps", interval("{:.3f}", 0), "predicting"),
        ("of the probe", interval("{:.4f}", 0), "probing"),
    ]  # fmt: skip
    return markdown(list(rows), *columns)
