"""AdaServe's comparison scaled down to this machine's real engine: real prompts, targets by what its steps take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, prompts
from jaxspec.bench.papers.adaserve.mix import MIX, Categories, capped
from jaxspec.bench.papers.adaserve.systems import INCREMENTAL, SARATHI, SYSTEMS
from jaxspec.bench.papers.serving import engines, once, turns
from jaxspec.bench.record import drive
from jaxspec.errors import explained
from jaxspec.outputs import RequestMetrics
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.workload import Lengths, Workload

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: Targets of the other categories by that of the strict one: 30 and 100 ms by 12.5 ms (Table 2, Llama-2-7b).
MODERATE, RELAXED = 2.4, 8.0
#: Fig. 10's, of strict requests under light load, which is this share of the load that halves attainment.
SCALE, LIGHT = 0.8, 0.25
#: §6.1's measurement of the baseline latency.
BATCH, PROMPT, ANSWER = 8, 32, 128
#: What a step computes beside decoding, as in configs/sarathi.yaml; the others have the engine's default.
CHUNKS: Mapping[str, Mapping[str, Any]] = {SARATHI: {"max_num_batched_tokens": 64}}
#: Attainment of continuous batching that is searched for, how near, and how often it is tried.
HALF, NEAR, TRIES = 0.5, 0.1, 8

Jobs = Callable[[int], tuple[Workload, Sequence[Sequence[int]]]]


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked: real texts for the short ones, and for the long ones texts one after the other."""

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
        """Each turn's requests, the strict ones with `scale` times their target."""
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
            return replace(work, input=np.array([len(own) for own in ids])), ids

        return turn


def on_engine(args: argparse.Namespace, short: Lengths, long: Lengths) -> dict[str, Any]:
    """Of each system's turns: the share of targets kept, tokens of requests that kept theirs and of all a second, and
    seconds to the first token; by rate, and under light load with strict targets alone."""
    from jaxspec.config import ConfigError, parse_overrides
    from jaxspec.models.load.tokenizer import chat_ids

    try:
        more = parse_overrides(args.set)
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
    except (ConfigError, OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    names = args.engine_systems or list(SYSTEMS)
    if unknown := sorted({*names} - {*SYSTEMS}):
        raise BenchError(f"--engine-systems: no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    plain = [name for name in (INCREMENTAL, SARATHI) if name in names]
    if not plain:
        raise BenchError(f"--engine-systems: {INCREMENTAL} or {SARATHI} must be there: they say what the load is")
    repeats = args.repeats or 3
    limits = {"enable_prefix_caching": False}
    presets = {name: {**limits, **SYSTEMS[name], **CHUNKS.get(name, {}), **more} for name in names}
    with engines(presets, args.model) as loaded:
        first = loaded[plain[0]]
        ids = [chat_ids(first.tokenizer, text) for text in texts]
        room = min(llm.engine.max_model_len for llm in loaded.values())
        baseline = measure(first, ids)
        longest = max(8, room - max(map(len, ids)) - 1)
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
    """Shorter requests; answers have at least two tokens, so that there is a time per token."""
    shorter = lambda column, by: np.maximum(2, np.round(by * column)).astype(int)  # noqa: E731
    return Lengths(shorter(table.input, inputs), shorter(table.output, outputs), table.predicted)


def fitting(table: Lengths, room: int) -> Lengths:
    """Cut to what the model holds beside the longest prompt."""
    return Lengths(capped(table, room).input, np.minimum(table.output, room // 2), table.predicted)


def measure(llm: LLM, texts: Sequence[Sequence[int]]) -> float:
    """Seconds per token of a small batch that decodes by itself, the second time."""
    longest = llm.engine.max_model_len - PROMPT
    params = SamplingParams(temperature=0, max_tokens=min(ANSWER, longest), ignore_eos=True)
    ids = [prompts.of_tokens(texts, PROMPT, i) for i in range(BATCH)]
    for _ in range(2):
        found = drive(llm.engine, [0.0] * BATCH, ids, [params] * BATCH)
    return float(np.median([m.tpot for m in found if m.tpot is not None]))


def compare(loaded: Mapping[str, LLM], jobs: Jobs, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    measured = turns(loaded, jobs, repeats, advance)
    work = [jobs(repeat)[0] for repeat in range(1, repeats + 1)]
    found = {name: [summary(m, w) for m, w in zip(own, work, strict=True)] for name, own in measured.items()}
    return {name: {key: [turn[key] for turn in own] for key in own[0]} for name, own in found.items()}


def summary(metrics: Sequence[RequestMetrics], work: Workload) -> dict[str, float]:
    """What became of one turn's requests."""
    assert work.tpot is not None
    met = np.array([m.tpot is None or m.tpot <= target for m, target in zip(metrics, work.tpot.tolist(), strict=True)])
    seconds = max(m.finished or 0.0 for m in metrics) - min(m.arrival for m in metrics)
    output = np.array([m.output_tokens for m in metrics])
    return {
        "attainment": float(met.mean()), "goodput": float(output[met].sum()) / seconds,
        "throughput": float(output.sum()) / seconds,
        "ttft": float(np.mean([m.ttft for m in metrics if m.ttft is not None])),
    }  # fmt: skip


def halving(plain: Mapping[str, LLM], requests: Requests, tried: list[list[float]]) -> float:
    """The rate at which the better one of these keeps half of the targets, by doubling and bisection; the rate tried
    that came nearest. `tried` gets (rate, attainment)."""
    rate = 1 / (requests.baseline * float(requests.short.output.mean()))  # one at a time
    low = high = None
    with progress("searching the rate at which half of the targets are kept", TRIES) as advance:
        for _ in range(TRIES):
            work, ids = requests.jobs(rate)(0)
            kept = max(summary(once(llm, work, ids), work)["attainment"] for llm in plain.values())
            tried.append([rate, kept])
            advance()
            if abs(kept - HALF) <= NEAR:
                return rate
            low, high = (rate, high) if kept > HALF else (low, rate)
            rate = 2 * (low or 0) if high is None else high / 2 if low is None else (low * high) ** 0.5
    return min(tried, key=lambda at: abs(at[1] - HALF))[0]
