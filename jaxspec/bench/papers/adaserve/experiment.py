"""AdaServe (Li et al. 2025): draft trees selected by SLO, against continuous batching and other draft trees.

Llama-2 on A100 with a drafter of 160 million parameters (§6.1). Requests of three categories, each with its TPOT SLO
(Table 2), arrive as in SplitWise's public trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.adaserve import systems
from jaxspec.bench.papers.adaserve.engine import on_engine
from jaxspec.bench.papers.adaserve.report import draw, sections
from jaxspec.bench.papers.adaserve.systems import CONTEXT, MIX, OURS, PAPER, SYSTEMS, TARGETS
from jaxspec.bench.papers.headlines import Headline
from jaxspec.bench.papers.page import File
from jaxspec.progress import progress
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import LLAMA2_A100, Machine, StepLoad, step_times
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload, read_lengths

#: Requests per second of Fig. 4, 5, 7 and 8.
RATES: Mapping[str, Sequence[float]] = {
    "llama-2-7b": (1, 2, 4, 6, 8, 10), "llama-2-70b": (0.5, 1, 2, 3, 4, 5),
}  # fmt: skip
#: Requests per second of Fig. 6: as in §6.2, and a load at which SLOs are as hard to meet here as in the paper.
FIXED: Mapping[str, Sequence[float]] = {"llama-2-7b": (1.9, 6), "llama-2-70b": (1.0, 3)}
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
#: Fig. 10: the model, requests per second, and SLOs relative to the baseline latency.
STRICTER, STRICTER_RATE, SCALES = "llama-2-70b", 1.0, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
#: Fig. 9: requests that decode at once, and output tokens of each.
CROWD, WRITTEN = 32, 128

Point = dict[str, Any]

TITLE = "AdaServe"
FILES = {
    "trace": File("traces/azure_llm_2023_conv.csv", "CSV", "column arrival_s: SplitWise's conversation trace"),
    "alpaca": File("prompts/alpaca.jsonl", "JSONL", 'lines of {"turns": [text], "reference": text}'),
    "arxiv": File("lengths/arxiv_summarization.csv", "CSV", "columns input_tokens, output_tokens"),
}  # fmt: skip


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("load")
    options.add_numbers(data, ("--minutes M", 3.0, "length of the arrival trace"))
    engine = parser.add_argument_group("with --engine")
    options.add_numbers(
        engine,
        ("--engine-jobs N", 48, "requests per turn"),
        ("--engine-scale X", 0.5, "factor on output lengths"),
        ("--engine-long X", 0.05, "factor on arXiv's prompt lengths"),
    )
    engine.add_argument(
        "--engine-rates", type=options.positive, nargs="+", metavar="R",
        help="requests/s (default: the rate at which continuous batching has 50 %% SLO attainment, and half of it)",
    )  # fmt: skip
    engine.add_argument("--engine-systems", nargs="+", metavar="NAME", help=f"{', '.join(SYSTEMS)} (default: all)")
    engine.add_argument(
        "--prompts", metavar="JSONL", help='lines of {"turns": [text, ...]} (default: the built-in prompts)'
    )


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(args, TITLE, FILES, read, lambda args, _, *data: simulated(args, *data), on_engine, sections, draw)


def read(args: argparse.Namespace) -> tuple[Lengths, Lengths]:
    """Lengths of short and of long requests. Raises OSError or ValueError."""
    arrivals.trace(args.trace, 2)
    return read_lengths(args.alpaca), read_lengths(args.arxiv)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on its machine, and the data that its requests are drawn from."""

    model: str
    short: Lengths
    long: Lengths
    trace: str
    minutes: float
    seeds: Sequence[int]

    @property
    def machine(self) -> Machine:
        return LLAMA2_A100[self.model]

    @property
    def baseline(self) -> float:
        """Baseline latency: seconds of a decode step of eight requests with 32 input and 128 output tokens (§6.1)."""
        return self.machine.cost.seconds(StepLoad(8, 0, 8 * (32 + 128 // 2)))

    def workload(
        self, rate: float, shares: Sequence[float], scale: float, seed: int
    ) -> tuple[Workload, np.ndarray]:  # fmt: skip
        """The requests, the same for every system, and their categories `[requests]`; `scale`: of the strict SLO."""
        count = max(1, round(60 * self.minutes * rate))
        targets = scale * self.baseline, *TARGETS[self.model]
        categories = systems.Categories((self.short, self.long, self.short), targets)
        rng = np.random.default_rng([seed, round(1000 * rate)])
        return categories.workload(arrivals.trace(self.trace, count, rate), shares, rng)

    def point(self, name: str, rate: float, shares: Sequence[float] = MIX, scale: float = 1.0) -> Point:
        """`summary` of a system's run, mean over the seeds."""
        found = []
        for seed in self.seeds:
            work, kind = self.workload(rate, shares, scale, seed)
            found.append(summary(systems.simulation(SYSTEMS[name], self.machine, work, seed).run(), kind))
        return {key: mean([one[key] for one in found]) for key in found[0]}


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def summary(served: Served, kind: np.ndarray) -> dict[str, float | None]:
    """SLO attainment overall and per category, goodput and throughput in tokens/s, mean TTFT in seconds, accepted
    (bonus token included) and drafted tokens per verification."""
    met, output = served.met, served.workload.output
    share = lambda rows: float(met[rows].mean()) if rows.any() else None  # noqa: E731
    return {
        "attainment": float(met.mean()), **{name: share(kind == k) for k, name in enumerate(systems.NAMES)},
        "goodput": float(output[met].sum()) / served.duration, "throughput": float(output.sum()) / served.duration,
        "ttft": float((served.first_token - served.workload.arrival).mean()),
        "accepted": 1 + float(served.accepted.sum()) / max(1, int(served.rounds.sum())),
        "drafted": float(served.drafted.sum()) / max(1, int(served.rounds.sum())),
    }  # fmt: skip


def simulated(args: argparse.Namespace, short: Lengths, long: Lengths) -> dict[str, Any]:
    """Run all simulated experiments."""
    seeds = range(args.seed, args.seed + (args.seeds or 1))
    lengths = systems.capped(short, CONTEXT), systems.capped(long, CONTEXT)
    settings = {model: Setting(model, *lengths, args.trace, args.minutes, seeds) for model in RATES}
    some = (*systems.BASELINES, PAPER, OURS)
    ablation = (PAPER, systems.UNCALIBRATED, systems.GLOBAL, OURS)
    points = sum(len(RATES[model]) * len(SYSTEMS) + len(FIXED[model]) * len(SHARES) * len(some) for model in settings)
    with progress("points", points + len(SCALES) * len(ablation) + 2) as advance:

        def point(setting: Setting, *args: Any) -> Point:
            advance()
            return setting.point(*args)

        by_rate = {
            model: {name: {str(rate): point(own, name, rate) for rate in RATES[model]} for name in SYSTEMS}
            for model, own in settings.items()
        }
        by_share = {
            model: {
                str(rate): {
                    name: {str(s): point(own, name, rate, systems.strict_share(s)) for s in SHARES} for name in some
                }
                for rate in FIXED[model]
            }
            for model, own in settings.items()
        }  # fmt: skip
        own = settings[STRICTER]
        stricter = {
            name: {str(s): point(own, name, STRICTER_RATE, (1, 0, 0), s) for s in SCALES} for name in ablation
        }  # fmt: skip
        breakdown = {}
        for name in (PAPER, OURS):
            breakdown[name] = shares_of_a_step(settings["llama-2-7b"], name)
            advance()
    return {
        "minutes": args.minutes, "repeats": len(seeds),
        "lengths": {name: [float(t.input.mean()), float(t.output.mean())] for name, t in
                    (("alpaca", own.short), ("arxiv", own.long))},
        "baseline_ms": {model: 1e3 * own.baseline for model, own in settings.items()},
        "budget": {model: step_times(own.machine.cost, CONTEXT).verify_budget for model, own in settings.items()},
        "by_rate": by_rate, "by_share": by_share, "stricter": {"rate": STRICTER_RATE, "systems": stricter},
        "breakdown": breakdown,
    }  # fmt: skip


def shares_of_a_step(setting: Setting, name: str) -> dict[str, float]:
    """Milliseconds per step with many requests (Fig. 9): selection (measured here), drafter and target (simulated)."""
    rows = np.random.default_rng(0).integers(len(setting.short), size=CROWD)
    tpot = np.array([setting.baseline, *TARGETS[setting.model]])[np.arange(CROWD) % 3]
    work = Workload(
        np.zeros(CROWD), setting.short.input[rows], np.full(CROWD, WRITTEN), np.full(CROWD, np.nan), tpot
    )  # fmt: skip
    run = systems.simulation(SYSTEMS[name], setting.machine, work, 0)
    assert run.speculator is not None
    (drafter,), spent = run.drafters, dict[str, float]()
    for owner, what in ((run.speculator, "lookahead"), (run.speculator, "draft"), (drafter, "propose")):
        setattr(owner, what, timed(getattr(owner, what), what, spent))
    served = run.run()
    # The simulated drafter runs on the host too, and is not part of the selection.
    selection = spent["lookahead"] + spent["draft"] - spent["propose"]
    per_step = 1e3 / served.steps
    return {
        "selection": per_step * selection, "drafter": per_step * run.drafting,
        "target": per_step * (served.busy - run.drafting),
    }  # fmt: skip


def timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """`call`, adding its seconds to `spent[name]`."""

    def measured(*args: Any) -> Any:
        begun = perf_counter()
        try:
            return call(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + perf_counter() - begun

    return measured
