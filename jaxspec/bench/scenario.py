"""One simulation as the options of `bench simulate` describe it: its requests, a preset's scheduler, a cost model."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.bench import options
from jaxspec.bench.report import Distribution, Report, Sample, Slo
from jaxspec.bench.standins import drafters_of, stand_in
from jaxspec.config import ConfigError, EngineConfig, parse_overrides
from jaxspec.draft.speculator import build_speculator
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Acceptance, Sampled, load_process
from jaxspec.sched.sim.cost import Cost, StepLoad, load_cost, step_times
from jaxspec.sched.sim.prompts import shared
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.timeline import Span, Timeline
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Workload, join, read_lengths
from jaxspec.sched.timing import SwapCosts

#: The engine's minimum of logit rows, repeated here because `jaxspec.step.buckets` imports JAX.
MIN_LOGIT_ROWS = 64
#: Prompt tokens of the step from which the cost of one prompt token is computed.
FULL_STEP = 256
#: Maximum number of requests written to the JSON file and plotted; of more requests an evenly spaced subset.
MAX_SAMPLES = 10_000


class Scenario:
    """What the options say, of which `config`, `request_rate` and `seed` have one value each.

    The same options give the same requests and the same results. Raises OSError, or ValueError for bad input.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        for_arrivals, for_lengths, _, for_prefixes = _streams(args.seed)
        config = settings(args)
        config = config.model_copy(update={"policy_seed": config.policy_seed + args.seed})
        self.cost, self._process = load_cost(args.cost), load_process(args.acceptance)
        #: What replaces missing inputs.
        self.notes: list[str]
        self.workload, self.notes = _workload(args, for_arrivals, for_lengths)
        if args.max_tokens is not None:
            self.workload = self.workload.cut(args.max_tokens)
        if args.shared_prefixes:
            self.workload = _with_prefixes(self.workload, args.shared_prefixes, for_prefixes)
        self._trees = args.draft_length is None and bool(config.draft)
        self.draft_length: int = args.draft_length or 0
        simulated = stand_in(config, self.workload, args.host_pages, self._trees or self.draft_length > 0)
        self.config, self._slo = simulated.config, simulated.slo
        self.notes += simulated.notes
        #: The SLO that the report counts.
        self.slo = options.slo(args) or Slo(config.slo.ttft_ms, config.slo.tpot_ms) or None

    @property
    def drawn(self) -> list[str]:
        """What depends on the seed, apart from arrivals and lengths."""
        drawn = {
            "the prompts' prefixes": bool(self.args.shared_prefixes),
            "which drafts are accepted": self._trees or self.draft_length > 0,
            "predictions": self.config.predictor == "noisy_oracle" and self.config.predictor_noise > 0,
            "the errors of order pairwise": self.config.order == "pairwise",
        }
        return [part for part, random in drawn.items() if random]

    def scheduler(self) -> Scheduler:
        """A new scheduler without requests."""
        costs = swap_costs(self.cost, self.args.swap_page_ms / 1000)
        return build_scheduler(self.config, self.workload, self.cost, self.args.host_pages, costs)

    def acceptance(self) -> Acceptance | None:
        """Acceptance of simulated draft chains of `draft_length` tokens; None if nothing is drafted."""
        drafts = _streams(self.args.seed)[2]
        return Sampled(self._process, len(self.workload), drafts) if self.draft_length else None

    def simulation(self) -> tuple[Simulation, list[str]]:
        """A simulation that has not begun, and notes on its drafters."""
        scheduler = self.scheduler()
        if not self._trees:
            chain = self.acceptance(), self.draft_length
            return Simulation(scheduler, self.workload, self.cost, *chain, slo=self._slo), []
        times = scheduler.config.times
        assert times is not None
        drafts = _streams(self.args.seed)[2]
        drafters, note = drafters_of(self.config, self.workload, self._process, self.cost, drafts)
        speculator = build_speculator(self.config, drafters, times)
        return TreeSimulation(
            scheduler, self.workload, self.cost, speculator, drafters, self.config.micro_batches, slo=self._slo
        ), [note]

    def timeline(self, ids: Collection[str]) -> dict[str, list[Span]]:
        """What these requests do, in a run of its own."""
        simulation, _ = self.simulation()
        timeline = Timeline(simulation.scheduler, ids)
        simulation.run()
        return timeline.spans

    def report(self, served: Served) -> Report:
        """The report of a run."""
        return summarise(served, options.plain(self.args), self.slo)


def _streams(seed: int) -> list[np.random.Generator]:
    """Random numbers of arrivals, lengths, drafts and prefixes. Streams of their own, so that another trace or
    acceptance does not change the lengths."""
    return np.random.default_rng(seed).spawn(4)


def settings(args: argparse.Namespace) -> EngineConfig:
    """The config given by the options. Raises `ConfigError`, or ValueError naming an option."""
    if args.draft_length is not None and args.draft_length < 0:
        raise ValueError(f"--draft-length must not be negative, got {args.draft_length}")
    # The engine drafts by default; a simulation without a preset is a plain baseline.
    defaults = {} if args.config else {"draft": []}
    return EngineConfig.load(args.config, **{**defaults, **parse_overrides(args.set)})


def _workload(
    args: argparse.Namespace, for_arrivals: np.random.Generator, for_lengths: np.random.Generator
) -> tuple[Workload, list[str]]:
    """The requests, and a note if their lengths are synthetic. Raises OSError or ValueError."""
    lengths = read_lengths(args.lengths, args.predictions) if args.lengths else None
    if args.predictions and lengths is None:
        raise ValueError("--predictions names a column of --lengths, which is not given")
    requests = when(args, for_arrivals)
    if lengths is None and all(a.output_tokens is None for a in requests):
        synthetic = args.output_tokens
        requests = synthetic.draw(requests, for_lengths)
        note = (
            f"lengths: output lengths are synthetic: log-normal with median {synthetic.median:g} tokens, "
            f"σ {synthetic.sigma:g}, at most {synthetic.most} (change with --output-tokens MEDIAN:SIGMA, or read real "
            "ones with --lengths FILE)"
        )
        return join(requests, None, args.input_tokens, for_lengths), [note]
    return join(requests, lengths, args.input_tokens, for_lengths), []


def _with_prefixes(workload: Workload, groups: tuple[int, int], rng: np.random.Generator) -> Workload:
    """The workload with shared prefixes before its prompts. Raises ValueError if they share something already."""
    if workload.prompts is not None:
        raise ValueError("--shared-prefixes: the trace says already what its prompts share")
    inputs, prompts = shared(workload.input.tolist(), *groups, rng)
    return replace(workload, input=inputs, prompts=prompts)


def when(args: argparse.Namespace, rng: np.random.Generator) -> list[arrivals.Arrival]:
    """The arrivals given by the options, with several replicas as many times more and as many times faster. Raises
    OSError or ValueError."""
    if args.burst and (args.trace or args.request_rate):
        raise ValueError("--burst: all requests arrive at once, so it excludes --trace and --request-rate")
    times = args.replicas or 1
    rate = args.request_rate and times * args.request_rate
    if args.trace:
        found = arrivals.trace(args.trace, args.num_requests and times * args.num_requests, rate)
        return found if rate else [replace(a, time=a.time / times) for a in found]
    count = times * (args.num_requests or 1000)
    if args.burst:
        return arrivals.burst(count)
    if not rate:
        raise ValueError("arrivals are missing: give --trace, --request-rate or --burst")
    return arrivals.gamma(count, rate, args.burstiness, rng)


def swap_costs(cost: Cost, page: float) -> SwapCosts:
    """The scheduler's estimate of swap and recompute costs under a cost model; `page`: seconds to move one page."""
    load = StepLoad(FULL_STEP, starting=1)
    return SwapCosts(page, page, cost.seconds(load) / FULL_STEP, cost.seconds(StepLoad(1)))


def build_scheduler(
    config: EngineConfig, workload: Workload, cost: Cost, host_pages: int = 0, costs: SwapCosts | None = None
) -> Scheduler:
    """The scheduler of a config, with an unlimited queue, and with prefix caching if it is known what prompts share.

    The context is `max_model_len`; if unset, it fits every request's `max_tokens`. The pool has `kv_cache_tokens`; if
    unset, it fits `max_num_seqs` requests that fill the context. Raises ValueError or `ConfigError`.
    """
    context = config.max_model_len or (int((workload.input + workload.caps).max()) if len(workload) else 1)
    longest = int((workload.input + workload.output).max()) if len(workload) else 1
    if longest > context:
        raise ConfigError(f"max_model_len ({context}): the longest request has {longest} tokens")
    pages = -(-(config.kv_cache_tokens or context * config.max_num_seqs) // config.page_size)
    limits = SchedulerConfig(
        config.max_num_seqs, config.token_budget, context, None,
        max(config.max_num_seqs, MIN_LOGIT_ROWS), config.policy, host_pages, costs=costs,
        times=step_times(cost, config.token_budget),
    )  # fmt: skip
    return Scheduler(limits, PagePool(pages, config.page_size, workload.prompts is not None))


def summarise(served: Served, given: dict[str, Any], slo: Any) -> Report:
    """The report of a simulation, computed on arrays because there may be millions of requests."""
    work, jct = served.workload, served.jct
    ttft, tpot = served.first_token - work.arrival, served.tpot
    per_second = 1 / served.duration if served.duration > 0 else 0.0
    tokens, caps = int(work.output.sum()), work.caps
    rows = np.unique(np.linspace(0, len(work) - 1, min(len(work), MAX_SAMPLES)).astype(int))
    report = Report(
        kind="simulate", options=given, duration_s=served.duration, completed=len(work), failed=0, errors={},
        input_tokens=int(work.input.sum()), output_tokens=tokens, output_tokens_per_s=tokens * per_second,
        requests_per_s=len(work) * per_second, ttft_ms=_spread(ttft), tpot_ms=_spread(tpot), itl_ms=None,
        e2e_ms=_spread(jct), queue_ms=_spread(served.first_scheduled - work.arrival), slo=slo,
        samples=[
            Sample(
                float(work.arrival[i]), float(ttft[i]), None if np.isnan(tpot[i]) else float(tpot[i]), float(jct[i]),
                input_tokens=int(work.input[i]), output_tokens=int(work.output[i]),
                finish_reason="stop" if work.output[i] < caps[i] else "length",
            )
            for i in rows
        ],
    )  # fmt: skip
    if slo:
        met = np.ones(len(work), bool)
        if slo.ttft_ms is not None:
            met &= 1e3 * ttft <= slo.ttft_ms
        if slo.tpot_ms is not None:
            met &= ~(1e3 * tpot > slo.tpot_ms)  # NaN (one output token) meets any target
        report.slo_attainment = float(met.mean())
        report.goodput_tokens_per_s = int(work.output[met].sum()) * per_second
    if drafted := int(served.drafted.sum()):
        report.acceptance_rate = int(served.accepted.sum()) / drafted
        report.mean_accepted_length = 1 + int(served.accepted.sum()) / int(served.rounds.sum())
    report.extra = {
        "steps": served.steps, "preemptions": int(served.preemptions.sum()), "pauses": served.pauses,
        "queued_steps": served.queued,
        "swaps": served.swaps, "swap_wait_s": served.stalled, "recomputed_tokens": served.recomputed,
        "busy_fraction": served.busy * per_second, "mean_jct_s": float(jct.mean()),
        "mean_queue_s": float((served.first_scheduled - work.arrival).mean()),
        "mean_normalised_latency_s": float((jct / work.output).mean()),
    }  # fmt: skip
    if work.prompts is not None and served.cached is not None:
        report.extra["prefix_hit_share"] = float(served.cached.sum() / work.input.sum())
    return report


def _spread(seconds: np.ndarray) -> Distribution | None:
    """The distribution of the values that are not NaN."""
    return Distribution.of(seconds[~np.isnan(seconds)].tolist())
