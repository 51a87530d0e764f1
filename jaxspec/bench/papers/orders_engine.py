"""Orders of requests on the engine: real prompts, sampled answers, and what the shipped predictor and probe say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.papers.estimates import estimate, interval, ratio
from jaxspec.bench.papers.presets import Preset, engines
from jaxspec.bench.record import drive
from jaxspec.bench.table import TIMES, Column, markdown, share
from jaxspec.config import ConfigError
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.llm import LLM
    from jaxspec.outputs import RequestMetrics

SLOTS, TEMPERATURE = 8, 0.8
FCFS = "fcfs, none"
_PREDICTED = {"draft": [], "predictor": "proxy", "length_probe": None, "aging_ms": None}
_KNOWN = _PREDICTED | {"predictor": "oracle"}
#: "order, predictor" -> its settings. No drafts, no aging: the orders alone differ.
CONTENDERS: Mapping[str, Preset] = {
    FCFS: Preset("fcfs"),
    "sjf, proxy": Preset("ssjf").but(**_PREDICTED),
    "srpt, proxy": Preset("srpt").but(**_PREDICTED),
    "srpt, probe": Preset("srpt").but(**_PREDICTED | {"length_probe": "auto"}),
    "gittins, probe": Preset("gittins").but(**_PREDICTED | {"length_probe": "auto"}),
    "boost, proxy": Preset("boost").but(**_PREDICTED),
    "sjf, oracle": Preset("ssjf").but(**_KNOWN),
    "srpt, oracle": Preset("srpt").but(**_KNOWN),
}


@dataclass(frozen=True, slots=True)
class Work:
    """`jobs` requests per turn, at `load` times the rate at which the engine serves all of them at once."""

    answers: str
    jobs: int
    load: float
    cap: int
    turns: int
    seed: int


def measure(work: Work, model: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Serve the same requests in every order, turn by turn. Raises `BenchError`."""
    limits = {"max_num_seqs": SLOTS, "kv_cache_tokens": 16_384, "enable_prefix_caching": False} | dict(settings)
    presets = {name: preset.but(**limits) for name, preset in CONTENDERS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in presets}
    rates = []
    with engines(presets, model) as loaded, progress("turns", len(presets) * work.turns + 1) as advance:
        first = next(iter(loaded.values()))
        prompts = held_out(work.answers, first)
        if len(prompts) < work.jobs:
            raise BenchError(f"--engine: {len(prompts)} prompts of the test part are too few for {work.jobs} requests")
        lengths, seconds = _answered(first.engine, prompts, work)
        advance()
        for turn in range(work.turns):
            rng = np.random.default_rng([work.seed, turn])
            rows = rng.choice(len(prompts), work.jobs, replace=False).tolist()
            rates.append(work.load * len(prompts) / seconds)
            at = [a.time for a in arrivals.poisson(work.jobs, rates[-1], rng)]
            for name, llm in loaded.items():
                found[name].append(_serve(llm.engine, at, prompts, rows, lengths, work))
                advance()
    return {
        "jobs": work.jobs, "turns": work.turns, "cap": work.cap, "load": work.load, "slots": SLOTS,
        "rate": float(np.mean(rates)), "mean output": float(np.mean(lengths)), "cells": summary(found),
    }  # fmt: skip


def held_out(path: str, llm: LLM) -> list[list[int]]:
    """Token ids of the prompts in a file of `jaxspec.train_predictor.collect` that predictors hold out as their test
    part, each once. Raises `BenchError`."""
    from jaxspec.train_predictor.answers import read_data
    from jaxspec.train_predictor.data import TEST, part_of_row
    from jaxspec.train_predictor.probe import SHARE

    try:
        lines = [line for line, _ in read_data(path, None, None)]
        rows = [(tuple(line["prompt_ids"]), line.get("group")) for line in lines]
    except (OSError, ConfigError) as error:
        raise BenchError(f"--engine: {error}") from None
    except KeyError:
        raise BenchError(f"--engine: {path} lacks token ids: give a file of jaxspec.train_predictor.collect") from None
    kept = [ids for ids, group in rows if part_of_row(ids, group, llm.tokenizer, SHARE, SHARE) == TEST]
    longest = llm.engine.max_model_len // 2
    return [list(ids) for ids in dict.fromkeys(kept) if len(ids) <= longest]


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
) -> dict[str, float]:  # fmt: skip
    engine.reset_stats()
    before = engine.stats()
    metrics = drive(engine, at, [prompts[i] for i in rows], _params(rows, work), expected=[lengths[i] for i in rows])
    after = engine.stats()
    return {
        **_times(metrics),
        "preemptions": (after.preemptions - before.preemptions + after.pauses - before.pauses) / len(rows),
        "predicting": (after.predictions.seconds - before.predictions.seconds) / after.step_seconds,
        "probing": (after.predicted_again_seconds - before.predicted_again_seconds) / after.step_seconds,
    }  # fmt: skip


def _times(metrics: Sequence[RequestMetrics]) -> dict[str, float]:
    jct = [m.e2e for m in metrics if m.e2e is not None]
    ttft = [m.ttft for m in metrics if m.ttft is not None]
    return {"mean": float(np.mean(jct)), "p95": float(np.quantile(jct, 0.95)), "ttft": float(np.mean(ttft))}


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
        ("time of predictor / steps", interval(share), "predicting"),
        ("of probe / steps", interval("{:.2f} %", 0), lambda row: row["probing"] and [100 * x for x in row["probing"]]),
    ]  # fmt: skip
    return markdown(list(rows), *columns)
