"""What drafts are expected to gain on a GPU: Llama-3.1-8B on one H200 with an EAGLE-3 drafter, simulated.

The engine's own scheduler and tree policy (`tree: auto`) decode full batches on a virtual clock, with a roofline of the
GPU as the device. Nothing here ran on a GPU. Writes numbers, table and figure of docs/results/gpu_simulated.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.estimates import Estimate, estimate
from jaxspec.bench.papers import page
from jaxspec.bench.papers.eagle3 import FITTED, PUBLISHED, Tasks, acceptance_length, process
from jaxspec.bench.papers.runs import Runs
from jaxspec.bench.table import markdown
from jaxspec.config import EngineConfig
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.plan import Plan
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import LLAMA_3_8B_H200, step_times
from jaxspec.sched.sim.draft_cost import EAGLE3_8B_BYTES, EAGLE3_8B_H200, EAGLE3_8B_KV
from jaxspec.sched.sim.drafter import SimulatedDrafter
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Workload

NAME, TITLE = "gpu_simulated", "Drafts on an H200, simulated"
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (512, 2048, 8192)
#: Drafters worse than EAGLE-3: chances of the first candidate, with the batches and the context they are tried at.
WORSE, WORSE_BATCHES, WORSE_CONTEXT = (0.6, 0.3, 0.02), (1, 16, 64, 256), 2048
#: Output tokens per request, on average, over which the speed is measured, and least of them in all.
MEASURED, LEAST = 256, 2048
#: Token budget of a step and its logit rows, which bound the drafts: buckets for a GPU. Tokens of a page.
TOKENS, ROWS, PAGE = 2048, 512, 16
#: Widths that the engine's draft models offer.
WIDTHS = (1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_numbers(parser, ("--seeds N", 5, "random repetitions of each point"))
    parser.add_argument(
        "--processes", type=options.count, default=os.cpu_count() or 1, metavar="N",
        help="simulations at the same time (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", default="build/papers", metavar="DIR", help="folder of single results (default: %(default)s)"
    )
    parser.add_argument("--out", default="docs/results", metavar="DIR", help="output folder (default: docs/results)")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` requests with prompts of `context` tokens. `chance`: of the drafter's first candidate, instead of the
    fitted ones. `blind`: step times know only tokens."""

    batch: int
    context: int
    drafts: bool
    seed: int = 0
    chance: float | None = None
    blind: bool = False

    @property
    def tokens(self) -> int:
        """Output tokens per request over which the speed is measured."""
        return max(MEASURED, LEAST // self.batch)

    @property
    def longest(self) -> int:
        """Output tokens of a request: enough that none ends before the speed is measured."""
        return 4 * self.tokens

    @property
    def running(self) -> int:
        """Requests that fit the GPU's memory at once."""
        room, kv = LLAMA_3_8B_H200.room - EAGLE3_8B_BYTES, LLAMA_3_8B_H200.kv_bytes + EAGLE3_8B_KV
        return min(self.batch, int(room / kv) // (self.context + self.longest))


class _Done(Exception):
    """Raised to end a run once enough tokens were decoded."""


class Decoding(TreeSimulation):
    """Measures the steps in which all requests decode: prompts are computed before, by the target and the drafter."""

    tokens, seconds, decoding_steps, _enough = 0, 0.0, 0, 0

    def _time(self, plan: Plan, now: float) -> tuple[float, float]:
        if not all(s.request.decoding for s in plan.scheduled):
            for drafter in self.drafters:
                drafter.precompute_kv(plan.scheduled, lambda _: None)
        return super()._time(plan, now)

    def _update(self, plan: Plan, now: float, service: float) -> None:
        decoding, before = all(s.request.decoding for s in plan.scheduled), sum(self.ledger.left)
        super()._update(plan, now, service)
        if decoding:
            self.tokens += before - sum(self.ledger.left)
            self.seconds += service
            self.decoding_steps += 1
            if self.tokens >= self._enough:
                raise _Done

    def measure(self, tokens: int) -> None:
        """Run until this many tokens were decoded."""
        self._enough = tokens
        try:
            self.run()
        except _Done:
            return
        raise AssertionError("the requests ended before the speed was measured")


def serve(data: None, case: Case) -> dict[str, float]:
    """Tokens per second of one case; tokens and draft nodes per request and step."""
    requests, longest = case.running, case.longest
    config = EngineConfig.load(
        None, draft=["auto"] if case.drafts else [], tree="auto", prefill="first", max_num_seqs=requests,
        max_num_batched_tokens=TOKENS,
    )  # fmt: skip
    times = step_times(LLAMA_3_8B_H200.cost, TOKENS)
    if case.blind:
        times.position = 0.0
    total = case.context + longest
    limits = SchedulerConfig(requests, TOKENS, total, None, max(ROWS, requests), config.policy, times=times)
    scheduler = Scheduler(limits, PagePool(requests * -(-total // PAGE), PAGE, enable_prefix_caching=False))
    same = np.ones(requests, int)
    work = Workload(np.zeros(requests), case.context * same, longest * same, np.nan * same, max_tokens=longest * same)
    drafters: list[SimulatedDrafter] = []
    if case.drafts:
        rates = Tasks(case.seed, case.chance)
        rng = np.random.default_rng([case.seed, case.batch, case.context])
        drafters.append(
            SimulatedDrafter(process(rates, max(WIDTHS)), work.output.tolist(), EAGLE3_8B_H200, rng, WIDTHS)
        )
    speculator = build_speculator(config, drafters, times) if drafters else None
    run = Decoding(scheduler, work, LLAMA_3_8B_H200.cost, speculator, drafters)
    run.measure(requests * case.tokens)
    per_step = requests * run.decoding_steps
    return {
        "speed": run.tokens / run.seconds, "tokens": run.tokens / per_step,
        "drafts": sum(run.ledger.drafted) / per_step, "drafting": run.drafting / run.seconds,
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Simulate, and write the page. Raises `BenchError`."""
    runs = Runs(Path(args.keep) / f"{NAME}.jsonl", args.processes)
    numbers = simulated(runs, args.seeds, BATCHES, CONTEXTS, WORSE)
    kept = page.publish(args, NAME, TITLE, "simulated", numbers, sections)
    print(sections(kept)["speed"])
    draw(Path(args.out), kept["simulated"])
    return 0


def simulated(
    runs: Runs, seeds: int, batches: Sequence[int], contexts: Sequence[int], worse: Sequence[float]
) -> dict[str, Any]:
    """All numbers: speeds with and without drafts and without knowing the context, worse drafters, and the fit."""
    plain = [Case(batch, context, False) for context in contexts for batch in batches]
    tried = [Case(batch, WORSE_CONTEXT, False) for batch in WORSE_BATCHES] if worse else []
    drafted = {
        (case, blind): [replace(case, drafts=True, seed=seed, blind=blind) for seed in range(seeds)]
        for case in plain for blind in (False, True)
    }  # fmt: skip
    with_worse = {
        (case, chance): [replace(case, drafts=True, seed=seed, chance=chance) for seed in range(seeds)]
        for case in tried for chance in worse
    }  # fmt: skip
    every = [*plain, *tried, *(one for part in (*drafted.values(), *with_worse.values()) for one in part)]
    found = runs.results("simulations", serve, None, every)

    def relative(case: Case, part: Sequence[Case]) -> Estimate | None:
        return estimate([found[one]["speed"] / found[case]["speed"] for one in part])

    rows = [
        {
            "context": case.context, "batch": case.batch, "running": case.running, "plain": found[case]["speed"],
            "speed": estimate([found[one]["speed"] for one in drafted[case, False]]),
            "relative": relative(case, drafted[case, False]), "blind": relative(case, drafted[case, True]),
            **{
                name: float(np.mean([found[one][name] for one in drafted[case, False]]))
                for name in ("tokens", "drafts", "drafting")
            },
        }
        for case in plain
    ]  # fmt: skip
    return {
        "seeds": seeds, "rows": rows,
        "worse": [
            {"batch": case.batch, **{str(chance): relative(case, with_worse[case, chance]) for chance in worse}}
            for case in tried
        ],
        "lengths": {
            name: estimate([acceptance_length(FITTED[name], seed) for seed in range(seeds)]) for name in PUBLISHED
        },
    }  # fmt: skip


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page."""
    found = kept["simulated"]
    speeds = markdown(
        found["rows"], ("context", "{:,}", "context"), ("batch", _batch, lambda row: row),
        ("no drafts, tokens/s", "{:,.0f}", "plain"), ("`tree: auto`, tokens/s", lambda e: f"{e[0]:,.0f}", "speed"),
        ("relative (95 % interval)", interval, "relative"),
        ("times without context", interval, "blind"), ("draft nodes", "{:.1f}", "drafts"),
        ("tokens", "{:.2f}", "tokens"), ("drafting", lambda share: f"{100 * share:.0f} %", "drafting"),
    )  # fmt: skip
    worse = markdown(
        found["worse"], ("batch", "{}", "batch"), *((f"chance {chance:g}", interval, str(chance)) for chance in WORSE)
    )
    fit = markdown(
        ([name, length, FITTED[name], found["lengths"][name]] for name, length in PUBLISHED.items()),
        "data set", ("published τ", "{:.2f}"), ("fitted chance", "{:.3f}"), ("simulated τ", interval),
    )  # fmt: skip
    return {"speed": speeds, "worse": worse, "fit": fit}


def _batch(row: Mapping[str, Any]) -> str:
    return f"{row['batch']}" if row["running"] == row["batch"] else f"{row['batch']} ({row['running']} fit)"


def interval(value: Estimate) -> str:
    """A mean and the ends of its interval."""
    mean, low, high = value
    return f"{mean:.2f} ({low:.2f} … {high:.2f})"


def draw(out: Path, found: Mapping[str, Any]) -> None:
    """The gain by batch size, one line per context. Raises `BenchError`."""
    from jaxspec.bench.plot import lines

    series = {
        f"context {context:,}": {row["batch"]: row["relative"][0] for row in found["rows"] if row["context"] == context}
        for context in CONTEXTS
    }
    lines(
        out / f"{NAME}.png", series, "batch size", "tokens/s relative to no drafts",
        "simulated: Llama-3.1-8B on one H200, EAGLE-3",
    )  # fmt: skip
