"""AdaServe's comparison on the real engine: real prompts, SLOs derived from this machine's step times."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.estimates import Estimate, estimate, ratio
from jaxspec.bench.papers.adaserve.cases import generated
from jaxspec.bench.papers.adaserve.requests import MIX, Categories, capped
from jaxspec.bench.papers.adaserve.systems import BASELINES, GLOBAL, INCREMENTAL, OURS, PAPER, SEPARATE, SYSTEMS
from jaxspec.bench.papers.presets import engines, overrides
from jaxspec.bench.papers.serving import Jobs, turns
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
#: Fig. 10: factor on the strict SLO.
SCALE = 0.8
#: §6.1's measurement of the baseline latency: requests, prompt tokens, output tokens.
BATCH, PROMPT, ANSWER = 8, 32, 128
#: Systems by default: all baselines of Fig. 4, the best other tree, and the two that the page is about.
USUAL = (*BASELINES, GLOBAL, PAPER, OURS)
METRICS = "attainment", "goodput", "throughput", "ttft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("with --engine")
    options.add_numbers(
        engine,
        ("--engine-jobs N", 100, "requests per turn"),
        ("--engine-scale X", 0.15, "factor on output lengths"),
        ("--engine-long X", 0.05, "factor on arXiv's prompt lengths"),
    )
    engine.add_argument(
        "--engine-loads", type=options.positive, nargs="+", metavar="E",
        help="loads in Erlang: requests/s x mean output tokens x baseline latency (default: the simulated ones of "
        "Llama-2-7b in Fig. 6, and half of it)",
    )  # fmt: skip
    engine.add_argument(
        "--engine-light", type=options.positive, metavar="E",
        help="load with strict requests only (default: the simulated one of Fig. 10)",
    )  # fmt: skip
    engine.add_argument("--engine-systems", nargs="+", metavar="NAME", help=f"default: {', '.join(USUAL)}")
    engine.add_argument(
        "--prompts", metavar="JSONL", help='lines of {"turns": [text, ...]} (default: the built-in prompts)'
    )


def erlang(rate: float, outputs: Sequence[Lengths], shares: Sequence[float], seconds: float) -> float:
    """Requests that would decode at once if each token took `seconds`: rate x mean output tokens x seconds."""
    return rate * seconds * sum(s * float(table.output.mean()) for table, s in zip(outputs, shares, strict=True))


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the experiment: real prompts for short ones, and concatenated prompts for long ones.

    texts: token ids of the prompts; baseline: the strict TPOT SLO in seconds.
    """

    trace: Sequence[arrivals.Arrival]
    count: int
    short: Lengths
    long: Lengths
    texts: Sequence[Sequence[int]]
    baseline: float
    seed: int

    @property
    def targets(self) -> tuple[float, float, float]:
        return self.baseline, MODERATE * self.baseline, RELAXED * self.baseline

    @property
    def lengths(self) -> tuple[Lengths, Lengths, Lengths]:
        return self.short, self.long, self.short

    def jobs(self, load: float, shares: Sequence[float] = MIX, scale: float = 1.0) -> Jobs:
        """A function from the turn to its requests and prompts at this load in Erlang; strict requests have `scale`
        times their SLO."""
        strict, moderate, relaxed = self.targets
        categories = Categories(self.lengths, (scale * strict, moderate, relaxed))
        rate = load / erlang(1.0, self.lengths, shares, self.baseline)
        most = int(np.median([len(ids) for ids in self.texts]))

        def turn(repeat: int) -> tuple[Workload, Sequence[Sequence[int]]]:
            rng = np.random.default_rng([self.seed, repeat])
            work, kind = categories.workload(arrivals.part(self.trace, self.count, rate, rng), shares, rng)
            first = rng.integers(len(self.texts), size=len(work)).tolist()
            ids = [
                prompts.of_tokens(self.texts, max(most, n), i) if k == 1 else list(self.texts[i])
                for n, k, i in zip(work.input.tolist(), kind.tolist(), first, strict=True)
            ]
            # The engine's context, not that of Llama-2, bounds `max_tokens`.
            return replace(work, input=np.array([len(prompt) for prompt in ids]), max_tokens=None), ids

        return turn


def on_engine(
    args: argparse.Namespace, trace: Sequence[arrivals.Arrival], short: Lengths, long: Lengths,
    loads: Sequence[float], light: float,
) -> dict[str, Any]:  # fmt: skip
    """SLO attainment, goodput and throughput in tokens/s, and mean TTFT in seconds of each system, estimates over the
    turns; by load in Erlang (`loads`, unless given by an option), and with strict requests only at the load `light`.

    Raises `BenchError`.
    """
    from jaxspec.models.load.tokenizer import chat_ids

    settings = {"enable_prefix_caching": False, **overrides(args)}
    try:
        texts = prompts.load(args.prompts) if args.prompts else list(prompts.PROMPTS)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    known = [name for name in SYSTEMS if name != SEPARATE]
    names = args.engine_systems or USUAL
    if unknown := sorted({*names} - {*known}):
        raise BenchError(f"--engine-systems: no system {', '.join(unknown)}; known: {', '.join(known)}")
    loads, light, repeats = args.engine_loads or loads, args.engine_light or light, args.repeats or 3
    with engines({name: SYSTEMS[name].but(**settings) for name in names}, args.model) as loaded:
        first = loaded.get(INCREMENTAL) or next(iter(loaded.values()))
        ids = [chat_ids(first.tokenizer, text) for text in texts]
        context = min(llm.engine.max_model_len for llm in loaded.values())
        longest = max(8, context - max(map(len, ids)) - 1)
        requests = Requests(
            trace, args.engine_jobs, fitting(scaled(short, 1.0, args.engine_scale), longest),
            fitting(scaled(long, args.engine_long, args.engine_scale), longest), ids, measure(first, ids), args.seed,
        )  # fmt: skip
        with progress("turns", (len(loads) + 1) * len(loaded) * (repeats + 1)) as advance:
            by_load = {f"{load:.3g}": compare(loaded, requests.jobs(load), repeats, advance) for load in loads}
            alone = compare(loaded, requests.jobs(light, (1, 0, 0), SCALE), repeats, advance)
    return {
        "jobs": args.engine_jobs, "turns": repeats, "scale": args.engine_scale, "long": args.engine_long,
        "targets": requests.targets, "missing": [name for name in BASELINES if name not in names], "loads": by_load,
        "light": {"load": light, "scale": SCALE, **alone},
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
    """`systems`: each one's metrics; `gains`: its attainment and goodput relative to the best baseline of each turn.

    Without one of the baselines there are no gains.
    """
    measured = turns(loaded, jobs, repeats, advance)
    work = [jobs(repeat)[0] for repeat in range(1, repeats + 1)]
    found = {name: [summary(m, w) for m, w in zip(per_turn, work, strict=True)] for name, per_turn in measured.items()}
    values = {name: {what: [turn[what] for turn in per_turn] for what in METRICS} for name, per_turn in found.items()}
    return {
        "systems": {name: {what: estimate(v) for what, v in metrics.items()} for name, metrics in values.items()},
        "gains": gains(values),
    }  # fmt: skip


def gains(values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Estimate | None]]:
    """`{system: {metric: ratio}}` to the best of all baselines in each turn; empty if one of them was not run."""
    if not {*BASELINES} <= {*values}:
        return {}
    best = {
        what: [max(turn) for turn in zip(*(values[name][what] for name in BASELINES), strict=True)]
        for what in ("attainment", "goodput")
    }
    return {
        name: {what: ratio(metrics[what], base) for what, base in best.items()}
        for name, metrics in values.items() if name not in BASELINES
    }  # fmt: skip


def summary(metrics: Sequence[RequestMetrics], work: Workload) -> dict[str, float]:
    """One turn's metrics: tokens/s until the last arrival, and mean TTFT in seconds. Requests with one output token
    count for neither SLO attainment nor goodput."""
    assert work.tpot is not None
    known = np.array([m.tpot is not None for m in metrics])
    met = np.array([m.tpot is not None and m.tpot <= slo for m, slo in zip(metrics, work.tpot.tolist(), strict=True)])
    arrival, output = np.array([m.arrival for m in metrics]), np.array([m.output_tokens for m in metrics])
    first = arrival + np.array([inf if m.ttft is None else m.ttft for m in metrics])
    tokens = generated(first, np.array([m.finished or inf for m in metrics]), output, arrival.max())
    seconds = max(arrival.max() - arrival.min(), 1e-9)
    return {
        "attainment": float(met[known].mean()) if known.any() else 0.0, "goodput": float(tokens[met].sum()) / seconds,
        "throughput": float(tokens.sum()) / seconds,
        "ttft": float(np.mean([m.ttft for m in metrics if m.ttft is not None])),
    }  # fmt: skip
