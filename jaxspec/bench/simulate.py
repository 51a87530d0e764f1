"""Run the engine's scheduler on a virtual clock, with a cost model instead of a device.

Lengths come from a trace, a table or a log-normal distribution. Times are those of the cost model: use them to compare
policies, not machines. Whatever a preset needs but simulated requests lack (text, priorities, draft models) is
replaced, and a line before the results reports each replacement. See docs/simulate.md.
"""

from __future__ import annotations

import argparse
import time

from jaxspec.bench import BenchError, options, replicas, simulations
from jaxspec.bench.report import Report
from jaxspec.bench.scenario import Scenario
from jaxspec.errors import explained
from jaxspec.extras import install_hint
from jaxspec.progress import progress
from jaxspec.sched.sim.cost import PAPER_SCALE
from jaxspec.sched.sim.simulator import Stuck
from jaxspec.sched.sim.workload import MAX_TOKENS, Synthetic

SYNTHETIC = f"{Synthetic().median:g}:{Synthetic().sigma:g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system = parser.add_argument_group("system")
    system.add_argument(
        "--config", nargs="+", action="extend", metavar="YAML",
        help="preset, of which limits, policies and drafting are used (default: the engine's default limits, first "
        "come first served, no drafting); several are compared on the same requests",
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
    when.add_argument("--trace", metavar="FILE", help=options.TRACE_HELP)
    when.add_argument(
        "--request-rate", type=options.positive, nargs="+", metavar="R",
        help="mean requests per second; with --trace, rescales its arrival times. Several are simulated one by one",
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
    seed = "seed of arrivals, lengths, acceptance and predictions"
    work.add_argument("--seed", type=int, default=0, help=f"{seed} (default: 0)")
    options.add_numbers(
        work, ("--seeds N", 1, "repetitions with the next seeds; with more than one, numbers have 95 %% intervals")
    )
    options.add_slo(parser, " (default: the preset's slo settings)")
    replicas.add_arguments(parser)
    results = options.add_outputs(parser)
    results.add_argument(
        "--timeline", metavar="PNG",
        help=f"plot what up to {simulations.LANES} requests do over time, and what they wait for; needs matplotlib: "
        f"{install_hint('bench')}",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Report | int:
    """Simulate, print notes on replacements, and return the report. Several presets, rates, seeds or replicas are
    printed here, and the exit code is returned. Raises `BenchError` for bad input."""
    try:
        if simulations.several(args):
            return simulations.run(args)
        scenario = Scenario(simulations.single(args))
        scenario.notes += replicas.checked(scenario.args, scenario.config)
        if args.replicas is not None:
            return replicas.run(scenario)
        simulation, notes = scenario.simulation()
        notes = [*scenario.notes, *notes]
        for note in notes:
            print(note, flush=True)
        begin = time.perf_counter()
        with progress("percent of requests", 100) as advance:
            served = simulation.run(advance)
        report = scenario.report(served)
        report.extra["simulated_in_s"] = time.perf_counter() - begin
        report.extra["notes"] = notes + simulations.remarks(report)
        for note in report.extra["notes"][len(notes) :]:
            print(note)
        if args.timeline:
            simulations.draw_timeline(args.timeline, {simulations.name_of(scenario): scenario}, served)
    except (OSError, ValueError, Stuck) as error:
        raise BenchError(explained(error)) from None
    return report


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
