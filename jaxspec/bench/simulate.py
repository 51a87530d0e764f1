"""Requests served on a virtual clock: the scheduler itself, with a cost model in place of the device.

Lengths come from the trace, from a table, or from a synthetic distribution (log-normal); times are the cost model's, so
compare policies with them, not machines. What a preset needs and simulated requests lack is named with its stand-in.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import Distribution, Report, Sample, Slo
from jaxspec.bench.standins import drafters_of, speculator_of, stand_in
from jaxspec.config import ConfigError, EngineConfig, parse_overrides
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Sampled, load_process
from jaxspec.sched.sim.cost import PAPER_SCALE, Cost, StepLoad, load_cost, step_times
from jaxspec.sched.sim.simulator import Served, Simulation, Stuck
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import Synthetic, Workload, join, read_lengths
from jaxspec.sched.timing import SwapCosts

SYNTHETIC = f"{Synthetic().median:g}:{Synthetic().sigma:g}"
#: As of the engine (`jaxspec.step.buckets.choices`), whose module imports JAX.
MIN_LOGIT_ROWS = 64
#: Prompt tokens of the step that says what a prompt token costs.
FULL_STEP = 256
#: Requests that are written one by one into the JSON file and drawn; of more, as many evenly spread ones.
MOST_SAMPLES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system = parser.add_argument_group("system")
    plain = (
        "a preset: its limits, policies and drafts (default: the engine's limits, first come first served, no drafts)"
    )
    system.add_argument("--config", metavar="YAML", help=plain)
    system.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    scales = f"the file of a profile (jaxspec.bench record), or one of {', '.join(PAPER_SCALE)} (default: ssjf)"
    system.add_argument("--cost", default="ssjf", metavar="NAME|JSON", help=scales)
    chain = "draft a chain of N tokens a round; 0: none (default: what the preset drafts, by its tree and drafters)"
    system.add_argument("--draft-length", type=int, metavar="N", help=chain)
    drafts = "of each draft token: a rate, or a process fitted by jaxspec.bench record (default: 0.6)"
    system.add_argument("--acceptance", default="0.6", metavar="RATE|JSON", help=drafts)
    system.add_argument("--host-pages", type=options.count, default=0, metavar="N", help="to swap to (default: none)")
    each_way = "to move a page, each way (default: 1)"
    system.add_argument("--swap-page-ms", type=options.positive, default=1.0, metavar="MS", help=each_way)
    when = parser.add_argument_group("arrivals")
    when.add_argument("--trace", metavar="CSV", help="columns arrival_s[, input_tokens, output_tokens]")
    when.add_argument("--request-rate", type=options.positive, metavar="R", help="a second; stretches a trace")
    when.add_argument(
        "--burstiness", type=float, default=1.0, metavar="CV", help="of the gaps: 1 Poisson, more burstier"
    )
    when.add_argument("--burst", action="store_true", help="all at once")
    work = parser.add_argument_group("workload")
    work.add_argument("--num-requests", type=options.count, metavar="N", help="default: all of a trace, else 1000")
    work.add_argument("--lengths", metavar="CSV|JSONL", help="output_tokens[, input_tokens], or prompts with answers")
    made_up = (
        "where neither --lengths nor the trace says: answers are log-normal with this median and standard deviation of "
        f"the logarithm, at most {Synthetic().most} tokens (default: {SYNTHETIC}, in the mean 190)"
    )
    work.add_argument("--output-tokens", type=_synthetic, default=SYNTHETIC, metavar="MEDIAN[:SIGMA]", help=made_up)
    work.add_argument("--predictions", metavar="COLUMN", help="of --lengths: predicted output tokens, or classes")
    work.add_argument(
        "--input-tokens", type=options.count, default=64, metavar="N", help="of a prompt, where nothing says (64)"
    )
    work.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and acceptance")
    goals = parser.add_argument_group("service level")
    goals.add_argument("--slo-ttft-ms", type=options.positive, metavar="MS", help="time to first token")
    goals.add_argument("--slo-tpot-ms", type=options.positive, metavar="MS", help="mean time per token after it")
    options.add_outputs(parser)


def run(args: argparse.Namespace) -> Report:
    """Raises `BenchError` where nothing can be simulated."""
    # Streams of their own: another acceptance or another trace leaves the lengths what they were.
    for_arrivals, for_lengths, for_drafts = np.random.default_rng(args.seed).spawn(3)
    try:
        config = _settings(args)
        cost, process = load_cost(args.cost), load_process(args.acceptance)
        workload, notes = _workload(args, for_arrivals, for_lengths)
        drafting = bool(config.draft) if args.draft_length is None else args.draft_length > 0
        found = stand_in(config, workload, args.host_pages, drafting)
        notes += found.notes
        costs = swap_costs(cost, args.swap_page_ms / 1000)
        scheduler = build_scheduler(found.config, workload, cost, args.host_pages, costs)
        if args.draft_length is None and config.draft:
            times = scheduler.config.times
            assert times is not None
            drafters, assumed = drafters_of(found.config, workload, process, cost, for_drafts)
            notes.append(assumed)
            simulation: Simulation = TreeSimulation(
                scheduler, workload, cost, speculator_of(found.config, drafters, times), drafters,
                found.config.micro_batches, slo=found.slo,
            )  # fmt: skip
        else:
            length = args.draft_length or 0
            acceptance = Sampled(process, len(workload), for_drafts) if length else None
            simulation = Simulation(scheduler, workload, cost, acceptance, length, found.slo)
        for note in notes:
            print(note, flush=True)
        begin = time.perf_counter()
        with progress("percent of requests", 100) as advance:
            served = simulation.run(advance)
    except (OSError, ValueError, Stuck) as error:
        raise BenchError(explained(error)) from None
    targets = config.slo
    report = summarise(served, options.plain(args), options.slo(args) or Slo(targets.ttft_ms, targets.tpot_ms) or None)
    report.extra["simulated_in_s"] = time.perf_counter() - begin
    report.extra["notes"] = notes
    return report


def _settings(args: argparse.Namespace) -> EngineConfig:
    """Raises `ConfigError`, or ValueError naming an option."""
    if args.draft_length is not None and args.draft_length < 0:
        raise ValueError(f"--draft-length must not be negative, got {args.draft_length}")
    # Without a preset nobody asked for drafts: a plain baseline.
    plain = {} if args.config else {"draft": []}
    return EngineConfig.load(args.config, **{**plain, **parse_overrides(args.set)})


def _workload(
    args: argparse.Namespace, for_arrivals: np.random.Generator, for_lengths: np.random.Generator
) -> tuple[Workload, list[str]]:
    """The requests, and a line if their lengths are made up. Raises OSError or ValueError."""
    lengths = read_lengths(args.lengths, args.predictions) if args.lengths else None
    if args.predictions and lengths is None:
        raise ValueError("--predictions names a column of --lengths, which is not given")
    coming = when(args, for_arrivals)
    if lengths is None and all(a.output_tokens is None for a in coming):
        made_up = args.output_tokens
        coming = made_up.draw(coming, for_lengths)
        note = (
            f"lengths: synthetic answers, log-normal: median {made_up.median:g} tokens, σ {made_up.sigma:g}, at most "
            f"{made_up.most} (--output-tokens MEDIAN:SIGMA; --lengths FILE for real ones)"
        )
        return join(coming, None, args.input_tokens, for_lengths), [note]
    return join(coming, lengths, args.input_tokens, for_lengths), []


def _synthetic(text: str) -> Synthetic:
    """`MEDIAN` or `MEDIAN:SIGMA`."""
    median, _, sigma = text.partition(":")
    try:
        found = Synthetic(float(median), float(sigma) if sigma else Synthetic().sigma)
    except ValueError:
        found = Synthetic(median=0)
    if not (1 <= found.median <= found.most and 0 <= found.sigma < 10):
        raise argparse.ArgumentTypeError(f"must be MEDIAN[:SIGMA], a median from 1 to {found.most} tokens, not {text}")
    return found


def when(args: argparse.Namespace, rng: np.random.Generator) -> list[arrivals.Arrival]:
    """The arrivals that the options ask for. Raises OSError or ValueError."""
    count = args.num_requests or 1000
    if args.trace:
        return arrivals.trace(args.trace, args.num_requests, args.request_rate)
    if args.burst:
        return arrivals.burst(count)
    if not args.request_rate:
        raise ValueError("when do requests arrive? Give --trace, --request-rate or --burst")
    return arrivals.gamma(count, args.request_rate, args.burstiness, rng)


def swap_costs(cost: Cost, page: float) -> SwapCosts:
    """What a scheduler knows of a cost model beforehand, with the seconds to move a page each way."""
    load = StepLoad(FULL_STEP, starting=1)
    return SwapCosts(page, page, cost.seconds(load) / FULL_STEP, cost.seconds(StepLoad(1)))


def build_scheduler(
    config: EngineConfig, workload: Workload, cost: Cost, host_pages: int = 0, costs: SwapCosts | None = None
) -> Scheduler:
    """The scheduler of a preset, with pages for its KV pool, or where it names none, for as many of the longest request
    as may run; nobody is refused, and prefixes are not cached. Raises ValueError, `ConfigError`."""
    longest = int((workload.input + workload.output).max()) if len(workload) else 1
    if config.max_model_len is not None and longest > config.max_model_len:
        raise ConfigError(f"max_model_len ({config.max_model_len}): the longest request has {longest} tokens")
    pages = -(-(config.kv_cache_tokens or longest * config.max_num_seqs) // config.page_size)
    limits = SchedulerConfig(
        config.max_num_seqs, config.max_num_batched_tokens, max(longest, config.max_model_len or 0), None,
        max(config.max_num_seqs, MIN_LOGIT_ROWS), config.policy, host_pages, costs=costs,
        times=step_times(cost, config.max_num_batched_tokens),
    )  # fmt: skip
    return Scheduler(limits, PagePool(pages, config.page_size, enable_prefix_caching=False))


def summarise(served: Served, given: dict[str, Any], slo: Any) -> Report:
    """The numbers of a benchmark; every request is a row of arrays, so there may be millions."""
    work, jct = served.workload, served.jct
    ttft, tpot = served.first_token - work.arrival, served.tpot
    per_second = 1 / served.duration if served.duration > 0 else 0.0
    tokens = int(work.output.sum())
    rows = np.unique(np.linspace(0, len(work) - 1, min(len(work), MOST_SAMPLES)).astype(int))
    report = Report(
        kind="simulate", options=given, duration_s=served.duration, completed=len(work), failed=0, errors={},
        input_tokens=int(work.input.sum()), output_tokens=tokens, output_tokens_per_s=tokens * per_second,
        requests_per_s=len(work) * per_second, ttft_ms=_spread(ttft), tpot_ms=_spread(tpot), itl_ms=None,
        e2e_ms=_spread(jct), slo=slo,
        samples=[
            Sample(
                float(work.arrival[i]), float(ttft[i]), None if np.isnan(tpot[i]) else float(tpot[i]), float(jct[i]),
                input_tokens=int(work.input[i]), output_tokens=int(work.output[i]), finish_reason="length",
            )
            for i in rows
        ],
    )  # fmt: skip
    if slo:
        met = np.ones(len(work), bool)
        if slo.ttft_ms is not None:
            met &= 1e3 * ttft <= slo.ttft_ms
        if slo.tpot_ms is not None:
            met &= ~(1e3 * tpot > slo.tpot_ms)  # one token has no TPOT
        report.slo_attainment = float(met.mean())
        report.goodput_tokens_per_s = int(work.output[met].sum()) * per_second
    if drafted := int(served.drafted.sum()):
        report.acceptance_rate = int(served.accepted.sum()) / drafted
        report.mean_accepted_length = 1 + int(served.accepted.sum()) / int(served.rounds.sum())
    report.extra = {
        "steps": served.steps, "preemptions": int(served.preemptions.sum()), "pauses": served.pauses,
        "swaps": served.swaps, "swap_wait_s": served.stalled, "recomputed_tokens": served.recomputed,
        "busy_fraction": served.busy * per_second, "mean_jct_s": float(jct.mean()),
        "mean_queue_s": float((served.first_scheduled - work.arrival).mean()),
        "mean_normalised_latency_s": float((jct / work.output).mean()),
    }  # fmt: skip
    return report


def _spread(seconds: np.ndarray) -> Distribution | None:
    """Of those that are numbers."""
    return Distribution.of(seconds[~np.isnan(seconds)].tolist())
