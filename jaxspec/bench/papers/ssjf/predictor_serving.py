"""A trained length predictor on the engine: SSJF with it, compared with FCFS and with SJF with known lengths.

Real prompts of the test split, answered up to their end token or a cap. All prompts are served once beforehand to
measure their answers' lengths for the oracle. In a turn all orders get the same prompts, arrivals and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxspec.bench import BenchError, prompts
from jaxspec.bench.papers.presets import Preset, engines
from jaxspec.bench.papers.serving import mean_jct
from jaxspec.bench.record import drive
from jaxspec.bench.table import each, markdown, spread
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.outputs import RequestMetrics
    from jaxspec.train_predictor.config import PredictorConfig

T = TypeVar("T")

CONCURRENCY = 4
ORDERS = FCFS, TRAINED, KNOWN = "FCFS", "SSJF, trained predictor", "SJF, lengths known"
#: Requests that each batching mode runs at once.
MODES: Mapping[str, int] = {"none": 1, "dynamic": CONCURRENCY, "continuous": CONCURRENCY}


@dataclass(frozen=True)
class Workload:
    """`jobs` requests per turn, `rate` per second, with prompts of `files`, answered to their end or `cap` tokens."""

    files: Sequence[str]
    jobs: int
    cap: int
    rate: float
    turns: int


def measure(
    config: PredictorConfig, predictor: str | None, work: Workload, modes: Sequence[str], seed: int
) -> dict[str, Any]:
    """JCT reductions of each turn in per cent, `{mode: {order: [turns]}}`, and prediction times.

    `predictor`: name or file; None: the one shipped for the model. Raises `BenchError`.
    """
    jobs = work.jobs
    orders = {
        FCFS: Preset("fcfs"),
        TRAINED: Preset("ssjf").but(predictor_model=predictor),
        KNOWN: Preset("sjf_oracle"),
    }
    presets = {
        f"{mode}, {name}": order.but(
            batching=mode, max_num_seqs=MODES[mode], max_batch_size=MODES[mode],
            enable_prefix_caching=False,  # only the first engine serves all prompts beforehand
        )
        for mode in modes
        for name, order in orders.items()
    }  # fmt: skip
    reduction: dict[str, dict[str, list[float]]] = {mode: {TRAINED: [], KNOWN: []} for mode in modes}
    overhead, executed = [], []
    with (
        engines(presets, config.target) as loaded,
        progress("turns", 1 + len(presets) * work.turns) as advance,
    ):
        first = next(iter(loaded.values()))
        ids = held_out(work.files, first, config)
        params = SamplingParams(temperature=0, max_tokens=work.cap)
        drawn = np.random.default_rng(seed).permutation(len(ids))[: jobs * work.turns]
        if len(drawn) < jobs:
            raise BenchError(f"--prompts: {len(ids)} prompts of the test split are too few for --jobs {jobs}")
        selected = [ids[i] for i in drawn]
        length: list[int] = []
        for start in range(0, len(selected), jobs):
            part = selected[start : start + jobs]
            length += [m.output_tokens for m in drive(first.engine, [0.0] * len(part), part, [params] * len(part))]
        advance()
        for repeat in range(work.turns):
            rng = np.random.default_rng([seed, repeat])
            rows = [i % len(selected) for i in range(repeat * jobs, (repeat + 1) * jobs)]
            at = [a.time for a in arrivals.poisson(jobs, work.rate, rng)]
            for mode in modes:
                jct = {}
                for name in ORDERS:
                    engine = loaded[f"{mode}, {name}"].engine
                    engine.reset_stats()
                    before = engine.stats().predictions
                    found = drive(
                        engine, at, [selected[i] for i in rows], [params] * jobs, expected=[length[i] for i in rows]
                    )
                    jct[name] = mean_jct(found)
                    if name == TRAINED:
                        after = engine.stats()
                        overhead.append((after.predictions.seconds - before.seconds) / after.step_seconds)
                        executed += [seconds for m in found if (seconds := execution(m)) is not None]
                    advance()
                for name in (TRAINED, KNOWN):
                    reduction[mode][name].append(100 * (1 - jct[name] / jct[FCFS]))
        latency = one_at_a_time(first, selected[:100], predictor)
    return {
        "jobs": jobs, "cap": work.cap, "rate": work.rate, "reduction": reduction, "overhead": overhead,
        "latency_ms": latency, "execution_ms": {"mean": 1e3 * float(np.mean(executed)), "min": 1e3 * min(executed)},
    }  # fmt: skip


def held_out(files: Sequence[str], llm: LLM, config: PredictorConfig) -> list[list[int]]:
    """Token ids of the files' first turns that `config` assigns to the test split. Raises `BenchError`."""
    from jaxspec.models.load.tokenizer import chat_ids
    from jaxspec.train_predictor.data import TEST, group_of, part_of

    try:
        texts = [text for path in files for text in prompts.load(Path(path))]
    except (OSError, ValueError) as error:
        raise BenchError(f"--prompts: {error}") from None
    tokenizer = llm.tokenizer
    all_ids = [chat_ids(tokenizer, text) for text in dict.fromkeys(texts)]
    return [ids for ids in all_ids if part_of(group_of(tokenizer.decode(ids)), config.validation, config.test) == TEST]


def execution(metrics: RequestMetrics) -> float | None:
    """Seconds from a request's first step to its last token; None if it was not finished."""
    if metrics.e2e is None or metrics.first_scheduled is None:
        return None
    return metrics.e2e - (metrics.first_scheduled - metrics.arrival)


def one_at_a_time(llm: LLM, ids: Sequence[Sequence[int]], predictor: str | None) -> dict[str, float]:
    """Milliseconds per prediction, detokenising and tokenising included, while the engine is idle."""
    from jaxspec.predict.build import load_proxy

    proxy = load_proxy(predictor, llm.engine.model_name)
    proxy.warm_up()
    times = milliseconds(lambda one: proxy.predict([llm.tokenizer.decode(one, skip_special_tokens=True)]), ids)
    return {"mean": float(np.mean(times)), "max": max(times)}


def milliseconds(call: Callable[[T], object], items: Iterable[T]) -> list[float]:
    """Milliseconds of `call` for each of `items`, one after the other."""
    times = []
    for item in items:
        begun = time.perf_counter()
        call(item)
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def sections(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of the numbers from `measure`, by name."""
    rows = []
    for mode, turns in found["reduction"].items():
        kept = [100 * a / b for a, b in zip(turns[TRAINED], turns[KNOWN], strict=True)]
        rows.append([mode, turns[TRAINED], turns[KNOWN], kept])
    gains = each((TRAINED, KNOWN, "share of the gain with known lengths"), spread())
    latency, execution = found["latency_ms"], found["execution_ms"]["mean"]
    cost = [
        [f"one prediction, {name}", f"{ms:.1f} ms", f"{100 * ms / execution:.2f} %"]
        for name, ms in (("mean", latency["mean"]), ("max.", latency["max"]))
    ]
    cost += [
        ["execution of a request, mean", f"{execution:.0f} ms", "100 %"],
        ["prediction time / step time, all steps", None, f"{100 * float(np.median(found['overhead'])):.2f} %"],
    ]
    return {
        "on the engine": markdown(rows, "mean JCT reduction against FCFS", *gains),
        "latency": markdown(cost, "prediction latency", "time", "share of a request's execution"),
    }
