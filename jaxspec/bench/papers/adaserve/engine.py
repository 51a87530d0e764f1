"""AdaServe's comparison on the real engine: real prompts, SLOs derived from this machine's step times."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, prompts
from jaxspec.bench.papers.adaserve.systems import INCREMENTAL, MIX, SARATHI, SYSTEMS, Categories, capped
from jaxspec.bench.papers.presets import engines, overrides
from jaxspec.bench.papers.serving import Jobs, once, turns
from jaxspec.bench.record import drive
from jaxspec.errors import explained
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.workload import Lengths, Workload

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: SLOs of the other categories relative to the strict one: 30 and 100 ms relative to 12.5 ms (Table 2, Llama-2-7b).
MODERATE, RELAXED = 2.4, 8.0
#: Fig. 10: factor on the strict SLO, and the light load as a share of the highest rate.
SCALE, LIGHT = 0.8, 0.25
#: §6.1's measurement of the baseline latency: requests, prompt tokens, output tokens.
BATCH, PROMPT, ANSWER = 8, 32, 128
#: Search for the rate at which continuous batching has this SLO attainment: goal, tolerance, and most tries.
HALF, NEAR, TRIES = 0.5, 0.1, 8


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the experiment: real prompts for short ones, and concatenated prompts for long ones.

    texts: token ids of the prompts; baseline: the strict TPOT SLO in seconds.
    """

    trace: str
    count: int
    short: Lengths
    long: Lengths
    texts: Sequence[Sequence[int]]
    baseline: float
    seed: int

    @property
    def targets(self) -> tuple[float, float, float]:
        return self.baseline, MODERATE * self.baseline, RELAXED * self.baseline

    def jobs(self, rate: float, shares: Sequence[float] = MIX, scale: float = 1.0) -> Jobs:
        """A function from the turn to its requests and prompts; strict requests have `scale` times their SLO."""
        strict, moderate, relaxed = self.targets
        categories = Categories((self.short, self.long, self.short), (scale * strict, moderate, relaxed))
        at = arrivals.trace(self.trace, self.count, rate)
        most = int(np.median([len(ids) for ids in self.texts]))

        def turn(repeat: int) -> tuple[Workload, Sequence[Sequence[int]]]:
            rng = np.random.default_rng([self.seed, repeat])
            work, kind = categories.workload(at, shares, rng)
            first = rng.integers(len(self.texts), size=len(work)).tolist()
            ids = [
                prompts.of_tokens(self.texts, max(most, n), i) if k == 1 else list(self.texts[i])
                for n, k, i in zip(work.input.tolist(), kind.tolist(), first, strict=True)
            ]
            return replace(work, input=np.array([len(prompt) for prompt in ids])), ids

        return turn


def on_engine(args: argparse.Namespace, short: Lengths, long: Lengths) -> dict[str, Any]:
    """SLO attainment, goodput and throughput in tokens/s, and mean TTFT in seconds of each system's turns; by rate, and
    under light load with strict requests only. Raises `BenchError`."""
    from jaxspec.models.load.tokenizer import chat_ids

    settings = {"enable_prefix_caching": False, **overrides(args)}
    try:
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    names = args.engine_systems or list(SYSTEMS)
    if unknown := sorted({*names} - {*SYSTEMS}):
        raise BenchError(f"--engine-systems: no system {', '.join(unknown)}; known: {', '.join(SYSTEMS)}")
    plain = [name for name in (INCREMENTAL, SARATHI) if name in names]
    if not plain:
        raise BenchError(f"--engine-systems: needs {INCREMENTAL} or {SARATHI}, which determine the load")
    repeats = args.repeats or 3
    with engines({name: SYSTEMS[name].but(**settings) for name in names}, args.model) as loaded:
        first = loaded[plain[0]]
        ids = [chat_ids(first.tokenizer, text) for text in texts]
        context = min(llm.engine.max_model_len for llm in loaded.values())
        baseline = measure(first, ids)
        longest = max(8, context - max(map(len, ids)) - 1)
        requests = Requests(
            args.trace, args.engine_jobs, fitting(scaled(short, 1.0, args.engine_scale), longest),
            fitting(scaled(long, args.engine_long, args.engine_scale), longest), ids, baseline, args.seed,
        )  # fmt: skip
        tried: list[list[float]] = []
        rates = args.engine_rates
        if not rates:
            half = halving({name: loaded[name] for name in plain}, requests, tried)
            rates = [half / 2, half]
        light = LIGHT * max(rates)
        with progress("turns", (len(rates) + 1) * len(loaded) * (repeats + 1)) as advance:
            by_rate = {str(rate): compare(loaded, requests.jobs(rate), repeats, advance) for rate in rates}
            alone = compare(loaded, requests.jobs(light, (1, 0, 0), SCALE), repeats, advance)
    return {
        "jobs": args.engine_jobs, "scale": args.engine_scale, "long": args.engine_long, "targets": requests.targets,
        "search": tried, "rates": by_rate, "light": {"rate": light, "scale": SCALE, "systems": alone},
    }  # fmt: skip


def scaled(table: Lengths, inputs: float, outputs: float) -> Lengths:
    """Lengths times these factors, at least two tokens, so that every request has a TPOT."""
    shorter = lambda column, factor: np.maximum(2, np.round(factor * column)).astype(int)  # noqa: E731
    return Lengths(shorter(table.input, inputs), shorter(table.output, outputs), table.predicted)


def fitting(table: Lengths, context: int) -> Lengths:
    """Lengths cut to `context` positions."""
    return Lengths(capped(table, context).input, np.minimum(table.output, context // 2), table.predicted)


def measure(llm: LLM, texts: Sequence[Sequence[int]]) -> float:
    """Baseline latency: median TPOT in seconds of `BATCH` requests that decode alone, in the second of two runs."""
    longest = llm.engine.max_model_len - PROMPT
    params = SamplingParams(temperature=0, max_tokens=min(ANSWER, longest), ignore_eos=True)
    ids = [prompts.of_tokens(texts, PROMPT, i) for i in range(BATCH)]
    drive(llm.engine, [0.0] * BATCH, ids, [params] * BATCH)
    found = drive(llm.engine, [0.0] * BATCH, ids, [params] * BATCH)
    return float(np.median([m.tpot for m in found if m.tpot is not None]))


def compare(loaded: Mapping[str, LLM], jobs: Jobs, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """`{system: {metric: [turns]}}`."""
    measured = turns(loaded, jobs, repeats, advance)
    work = [jobs(repeat)[0] for repeat in range(1, repeats + 1)]
    found = {name: [summary(m, w) for m, w in zip(per_turn, work, strict=True)] for name, per_turn in measured.items()}
    return {name: {key: [turn[key] for turn in per_turn] for key in per_turn[0]} for name, per_turn in found.items()}


def summary(metrics: Sequence[RequestMetrics], work: Workload) -> dict[str, float]:
    """One turn's metrics: tokens/s, and mean TTFT in seconds."""
    assert work.tpot is not None
    met = np.array([m.tpot is None or m.tpot <= slo for m, slo in zip(metrics, work.tpot.tolist(), strict=True)])
    seconds = max(m.finished or 0.0 for m in metrics) - min(m.arrival for m in metrics)
    output = np.array([m.output_tokens for m in metrics])
    return {
        "attainment": float(met.mean()), "goodput": float(output[met].sum()) / seconds,
        "throughput": float(output.sum()) / seconds,
        "ttft": float(np.mean([m.ttft for m in metrics if m.ttft is not None])),
    }  # fmt: skip


def halving(plain: Mapping[str, LLM], requests: Requests, tried: list[list[float]]) -> float:
    """The rate at which the better of these engines has 50 % SLO attainment, by doubling and bisection.

    Returns the closest of the tried rates; appends (rate, attainment) of each to `tried`.
    """
    rate = 1 / (requests.baseline * float(requests.short.output.mean()))  # about one request at a time
    low = high = None
    with progress("searching for the rate with 50 % SLO attainment", TRIES) as advance:
        for _ in range(TRIES):
            work, ids = requests.jobs(rate)(0)
            attainment = max(summary(once(llm, work, ids), work)["attainment"] for llm in plain.values())
            tried.append([rate, attainment])
            advance()
            if abs(attainment - HALF) <= NEAR:
                return rate
            low, high = (rate, high) if attainment > HALF else (low, rate)
            rate = 2 * (low or 0) if high is None else high / 2 if low is None else (low * high) ** 0.5
    return min(tried, key=lambda point: abs(point[1] - HALF))[0]
