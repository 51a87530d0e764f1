"""Run the engine's scheduler on a virtual clock, with a cost model instead of a device.

Lengths come from a trace, a table or a log-normal distribution. Times are those of the cost model: use them to compare
policies, not machines. Whatever a preset needs but simulated requests lack (text, priorities, draft models) is
replaced, and a line before the results reports each replacement. See docs/simulate.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options, replicas
from jaxspec.bench.report import Distribution, Report, Sample, Slo
from jaxspec.bench.standins import drafters_of, stand_in
from jaxspec.config import ConfigError, EngineConfig, parse_overrides
from jaxspec.draft.speculator import build_speculator
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Sampled, load_process
from jaxspec.sched.sim.cost import PAPER_SCALE, Cost, StepLoad, load_cost, step_times
from jaxspec.sched.sim.prompts import shared
from jaxspec.sched.sim.simulator import Served, Simulation, Stuck
from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.sim.workload import MAX_TOKENS, Synthetic, Workload, join, read_lengths
from jaxspec.sched.timing import SwapCosts

SYNTHETIC = f"{Synthetic().median:g}:{Synthetic().sigma:g}"
#: The engine's minimum of logit rows, repeated here because `jaxspec.step.buckets` imports JAX.
MIN_LOGIT_ROWS = 64
#: Prompt tokens of the step from which the cost of one prompt token is computed.
FULL_STEP = 256
#: Maximum number of requests written to the JSON file and plotted; of more requests an evenly spaced subset.
MAX_SAMPLES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system = parser.add_argument_group("system")
    system.add_argument(
        "--config", metavar="YAML",
        help="preset, of which limits, policies and drafting are used (default: the engine's default limits, first "
        "come first served, no drafting)",
    )  # fmt: skip
    system.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="engine setting (docs/configuration.md), overrides the preset; repeatable",
    )  # fmt: skip
    system.add_argument(
        "--cost", default="ssjf", metavar="NAME|JSON",
        help="cost model for step times: a file written by jaxspec.bench record --profile, or one of "
        f"{', '.join(PAPER_SCALE)} (default: %(default)s)",
    )  # fmt: skip
    system.add_argument(
        "--draft-length", type=int, metavar="N",
        help="draft a chain of N tokens per request and step; 0: no drafting (default: the preset's tree and drafters)",
    )  # fmt: skip
    system.add_argument(
        "--acceptance", default="0.6", metavar="RATE|JSON",
        help="acceptance of draft tokens: a probability, or a file written by jaxspec.bench record --acceptance "
        "(default: %(default)s)",
    )  # fmt: skip
    system.add_argument(
        "--host-pages", type=options.count, default=0, metavar="N",
        help="KV pages in host memory for swapping (default: none)",
    )  # fmt: skip
    options.add_numbers(system, ("--swap-page-ms MS", 1.0, "time to move one KV page, in each direction"))
    when = parser.add_argument_group("arrivals", "One of --trace, --request-rate and --burst is required.")
    when.add_argument("--trace", metavar="CSV", help=f"{options.TRACE_HELP}, or a .jsonl file in Mooncake's format")
    when.add_argument(
        "--request-rate", type=options.positive, metavar="R",
        help="mean requests per second; with --trace, rescales its arrival times",
    )  # fmt: skip
    when.add_argument("--burstiness", type=float, default=1.0, metavar="CV", help=options.BURSTINESS_HELP)
    when.add_argument("--burst", action="store_true", help="all requests arrive at once")
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--num-requests", type=options.count, metavar="N",
        help="number of requests (default: all of --trace, otherwise 1000)",
    )  # fmt: skip
    work.add_argument(
        "--lengths", metavar="CSV|JSONL",
        help="file to draw lengths from: CSV with the column output_tokens and optionally input_tokens, or JSONL of "
        "prompts with a reference answer",
    )  # fmt: skip
    work.add_argument(
        "--output-tokens", type=_synthetic, default=SYNTHETIC, metavar="MEDIAN[:SIGMA]",
        help="without --lengths and lengths in the trace: log-normal output lengths with this median and standard "
        f"deviation of the logarithm, at most {Synthetic().most} tokens (default: %(default)s, mean 190)",
    )  # fmt: skip
    work.add_argument(
        "--predictions", metavar="COLUMN",
        help="column of the --lengths CSV with predicted output tokens; if its name contains 'class', with classes",
    )  # fmt: skip
    work.add_argument(
        "--max-tokens", type=options.count, metavar="N",
        help="max_tokens of all requests, where longer answers are cut (default: "
        f"{MAX_TOKENS}, or what the context and the KV pool leave, and nothing is cut)",
    )  # fmt: skip
    options.add_numbers(work, ("--input-tokens N", 64, "prompt tokens of requests without a given input length"))
    work.add_argument(
        "--shared-prefixes", type=_groups, metavar="GROUPS:TOKENS",
        help="every prompt begins with one of GROUPS prefixes of TOKENS tokens, the k-th in proportion to 1/k, before "
        "its own tokens; enables the prefix cache",
    )  # fmt: skip
    work.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths and acceptance (default: 0)")
    slo_options = parser.add_argument_group(
        "SLO", "Latency targets used to compute SLO attainment and goodput (default: the preset's slo settings)."
    )
    slo_options.add_argument(
        "--slo-ttft-ms", type=options.positive, metavar="MS", help="target time to first token (TTFT)"
    )
    slo_options.add_argument(
        "--slo-tpot-ms", type=options.positive, metavar="MS",
        help="target mean time per output token after the first (TPOT)",
    )  # fmt: skip
    replicas.add_arguments(parser)
    options.add_outputs(parser)


def run(args: argparse.Namespace) -> Report | int:
    """Print the notes on replacements, simulate, and return the report; with --replicas print it, and return the exit
    code. Raises `BenchError` for bad input."""
    # Separate random streams, so that another trace or acceptance does not change the lengths.
    for_arrivals, for_lengths, for_drafts, for_prefixes = np.random.default_rng(args.seed).spawn(4)
    try:
        config = _settings(args)
        cost, process = load_cost(args.cost), load_process(args.acceptance)
        workload, notes = _workload(args, for_arrivals, for_lengths)
        if args.max_tokens is not None:
            workload = workload.cut(args.max_tokens)
        if args.shared_prefixes:
            workload = _with_prefixes(workload, args.shared_prefixes, for_prefixes)
        drafting = bool(config.draft) if args.draft_length is None else args.draft_length > 0
        simulated = stand_in(config, workload, args.host_pages, drafting)
        notes += simulated.notes + replicas.checked(args, simulated.config)
        costs = swap_costs(cost, args.swap_page_ms / 1000)

        def scheduler_of() -> Scheduler:
            return build_scheduler(simulated.config, workload, cost, args.host_pages, costs)

        targets = options.slo(args) or Slo(config.slo.ttft_ms, config.slo.tpot_ms) or None
        if args.replicas is not None:
            for note in notes:
                print(note, flush=True)
            length, given = args.draft_length or 0, options.plain(args)
            acceptance = Sampled(process, len(workload), for_drafts) if length else None
            fleet = replicas.Fleet(workload, cost, options.seconds(targets), acceptance, length)
            found = replicas.compare(args, fleet, scheduler_of, lambda served: summarise(served, given, targets))
            return replicas.finish(args, found, notes)
        scheduler = scheduler_of()
        if args.draft_length is None and config.draft:
            times = scheduler.config.times
            assert times is not None
            drafters, note = drafters_of(simulated.config, workload, process, cost, for_drafts)
            notes.append(note)
            simulation: Simulation = TreeSimulation(
                scheduler, workload, cost, build_speculator(simulated.config, drafters, times), drafters,
                simulated.config.micro_batches, slo=simulated.slo,
            )  # fmt: skip
        else:
            length = args.draft_length or 0
            acceptance = Sampled(process, len(workload), for_drafts) if length else None
            simulation = Simulation(scheduler, workload, cost, acceptance, length, simulated.slo)
        for note in notes:
            print(note, flush=True)
        begin = time.perf_counter()
        with progress("percent of requests", 100) as advance:
            served = simulation.run(advance)
    except (OSError, ValueError, Stuck) as error:
        raise BenchError(explained(error)) from None
    report = summarise(served, options.plain(args), targets)
    report.extra["simulated_in_s"] = time.perf_counter() - begin
    report.extra["notes"] = notes
    return report


def _settings(args: argparse.Namespace) -> EngineConfig:
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


def _groups(text: str) -> tuple[int, int]:
    """`GROUPS:TOKENS`."""
    groups, _, tokens = text.partition(":")
    try:
        return options.count(groups), options.count(tokens)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"must be GROUPS:TOKENS, both at least 1, got {text}") from None


def _synthetic(text: str) -> Synthetic:
    """`MEDIAN` or `MEDIAN:SIGMA`."""
    median, _, sigma = text.partition(":")
    try:
        synthetic = Synthetic(float(median), float(sigma) if sigma else Synthetic().sigma)
    except ValueError:
        synthetic = Synthetic(median=0)
    if not (1 <= synthetic.median <= synthetic.most and 0 <= synthetic.sigma < 10):
        raise argparse.ArgumentTypeError(
            f"must be MEDIAN[:SIGMA] with MEDIAN from 1 to {synthetic.most} and SIGMA from 0 to 10, got {text}"
        )
    return synthetic


def when(args: argparse.Namespace, rng: np.random.Generator) -> list[arrivals.Arrival]:
    """The arrivals given by the options, with several replicas as many times more and as many times faster. Raises
    OSError or ValueError."""
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
        e2e_ms=_spread(jct), slo=slo,
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
