"""AdaServe (Li et al. 2025): draft tokens by latency targets, against continuous batching and other draft trees.

Llama-2 on A100 with a drafter of 160 million parameters (§6.1), requests of three categories with a target for the time
per output token each (Table 2), arriving as in the public trace of SplitWise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.adaserve.mix import MIX, NAMES, TARGETS, Categories, capped, strict_share
from jaxspec.bench.papers.adaserve.report import draw, sections
from jaxspec.bench.papers.adaserve.systems import (
    BASELINES,
    CONTEXT,
    GLOBAL,
    OURS,
    PAPER,
    SYSTEMS,
    UNCALIBRATED,
    simulation,
)
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import LLAMA2_A100, Machine, StepLoad, step_times
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload, read_lengths

#: Requests a second of Fig. 4, 5, 7 and 8.
RATES: Mapping[str, Sequence[float]] = {
    "llama-2-7b": (1, 2, 4, 6, 8, 10), "llama-2-70b": (0.5, 1, 2, 3, 4, 5),
}  # fmt: skip
#: Of Fig. 6, by §6.2; and a load at which targets are as hard to keep here as there.
FIXED: Mapping[str, Sequence[float]] = {"llama-2-7b": (1.9, 6), "llama-2-70b": (1.0, 3)}
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
#: Fig. 10: the model, requests a second, and targets as shares of the baseline latency.
STRICTER, STRICTER_RATE, SCALES = "llama-2-70b", 1.0, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
#: Fig. 9: requests that decode at once, and tokens that each writes.
CROWD, WRITTEN = 32, 128

Point = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--trace", required=True, metavar="CSV", help="arrival_s: SplitWise's conversations")
    data.add_argument("--alpaca", required=True, metavar="JSONL", help='{"turns": [text], "reference": text} a line')
    data.add_argument("--arxiv", required=True, metavar="CSV", help="input_tokens, output_tokens")
    data.add_argument("--minutes", type=options.positive, default=3.0, metavar="M", help="of arrivals (default: 3)")
    engine = parser.add_argument_group("of --engine")
    engine.add_argument("--engine-jobs", type=options.count, default=48, metavar="N", help="requests a turn (48)")
    engine.add_argument("--engine-scale", type=options.positive, default=0.5, metavar="X", help="of the lengths (0.5)")
    engine.add_argument("--engine-long", type=options.positive, default=0.05, metavar="X", help="of arXiv's (0.05)")
    engine.add_argument(
        "--engine-rates", type=options.positive, nargs="+", metavar="R",
        help="requests a second (default: where continuous batching keeps half of the targets, and half of that)",
    )  # fmt: skip
    engine.add_argument("--engine-systems", nargs="+", metavar="NAME", help=f"of {', '.join(SYSTEMS)} (default: all)")
    engine.add_argument("--prompts", metavar="JSONL", help='{"turns": [text, ...]} (default: the built-in prompts)')


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where the data cannot be read or nothing can be run."""
    out = Path(args.out)
    try:
        tables = read_lengths(args.alpaca), read_lengths(args.arxiv)
        arrivals.trace(args.trace, 2)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    if args.engine:
        from jaxspec.bench.papers.adaserve.engine import on_engine

        kind, numbers = "engine", on_engine(args, *tables)
    else:
        kind, numbers = "simulated", simulated(args, *tables)
    kept = page.keep(out / "adaserve.json", kind, numbers, args.json)
    page.write(out / "adaserve.md", "AdaServe", sections(kept))
    if kind == "simulated":
        draw(out, kept["simulated"])
    return 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on its machine, with the requests that it serves."""

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
        """Seconds of a step of eight requests with 32 tokens each that write 128 (§6.1)."""
        return self.machine.cost.seconds(StepLoad(8, 0, 8 * (32 + 128 // 2)))

    def workload(
        self, rate: float, shares: Sequence[float], scale: float, seed: int
    ) -> tuple[Workload, np.ndarray]:  # fmt: skip
        """The same requests at the same times for every system, and their categories. `scale`: of the strict target."""
        count = max(1, round(60 * self.minutes * rate))
        categories = Categories((self.short, self.long, self.short), (scale * self.baseline, *TARGETS[self.model]))
        rng = np.random.default_rng([seed, round(1000 * rate)])
        return categories.workload(arrivals.trace(self.trace, count, rate), shares, rng)

    def point(self, name: str, rate: float, shares: Sequence[float] = MIX, scale: float = 1.0) -> Point:
        """What a system makes of it: means over the seeds."""
        found = []
        for seed in self.seeds:
            work, kind = self.workload(rate, shares, scale, seed)
            found.append(summary(simulation(SYSTEMS[name], self.machine, work, seed).run(), kind))
        return {key: mean([own[key] for own in found]) for key in found[0]}


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def summary(served: Served, kind: np.ndarray) -> dict[str, float | None]:
    """Shares of requests that kept their targets, of all and of each category; tokens a second; seconds."""
    met, output = served.met, served.workload.output
    share = lambda rows: float(met[rows].mean()) if rows.any() else None  # noqa: E731
    return {
        "attainment": float(met.mean()), **{name: share(kind == k) for k, name in enumerate(NAMES)},
        "goodput": float(output[met].sum()) / served.duration, "throughput": float(output.sum()) / served.duration,
        "ttft": float((served.first_token - served.workload.arrival).mean()),
        "accepted": 1 + float(served.accepted.sum()) / max(1, int(served.rounds.sum())),
        "drafted": float(served.drafted.sum()) / max(1, int(served.rounds.sum())),
    }  # fmt: skip


def simulated(args: argparse.Namespace, short: Lengths, long: Lengths) -> dict[str, Any]:
    seeds = range(args.seed, args.seed + (args.repeats or 1))
    settings = {
        model: Setting(model, capped(short, CONTEXT), capped(long, CONTEXT), args.trace, args.minutes, seeds)
        for model in RATES
    }
    some = (*BASELINES, PAPER, OURS)
    ablation = (PAPER, UNCALIBRATED, GLOBAL, OURS)
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
                    name: {str(s): point(own, name, rate, strict_share(s)) for s in SHARES} for name in some
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
    """Milliseconds of an iteration with many requests (Fig. 9): the selection's, measured here, and the models'."""
    rows = np.random.default_rng(0).integers(len(setting.short), size=CROWD)
    tpot = np.array([setting.baseline, *TARGETS[setting.model]])[np.arange(CROWD) % 3]
    work = Workload(
        np.zeros(CROWD), setting.short.input[rows], np.full(CROWD, WRITTEN), np.full(CROWD, np.nan), tpot
    )  # fmt: skip
    run = simulation(SYSTEMS[name], setting.machine, work, 0)
    assert run.speculator is not None
    (drafter,), spent = run.drafters, dict[str, float]()
    for owner, what in ((run.speculator, "lookahead"), (run.speculator, "draft"), (drafter, "propose")):
        setattr(owner, what, timed(getattr(owner, what), what, spent))
    served = run.run()
    # What stands in for the drafter computes on the host too: that is not the selection's.
    selection = spent["lookahead"] + spent["draft"] - spent["propose"]
    per_step = 1e3 / served.steps
    return {
        "selection": per_step * selection, "drafter": per_step * run.drafting,
        "target": per_step * (served.busy - run.drafting),
    }  # fmt: skip


def timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The same, its seconds added up."""

    def measured(*args: Any) -> Any:
        begun = perf_counter()
        try:
            return call(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + perf_counter() - begun

    return measured
