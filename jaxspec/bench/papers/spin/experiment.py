"""SPIN (arXiv 2503.15921): heterogeneous drafters chosen per request, verification without padding, a pipeline.

Without --engine, --verification or --pipeline the experiments are simulated at the paper's scale. Writes the numbers,
plots, and a page with tables next to the paper's numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.bench import BenchError, options
from jaxspec.bench.papers import page
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.spin import engine as spin_engine
from jaxspec.bench.papers.spin import pipeline as spin_pipeline
from jaxspec.bench.papers.spin import report
from jaxspec.bench.papers.spin.requests import UNKNOWN
from jaxspec.bench.papers.spin.simulation import read_datasets, simulated
from jaxspec.errors import explained

TITLE, headlines = "SPIN", report.headlines
FILES = {
    "alpaca": File("prompts/alpaca.jsonl", "JSONL", "Alpaca"),
    "chat": File("prompts/chatgpt_prompts.jsonl", "JSONL", "ChatGPT prompts (CP); answers may be missing"),
    "chat_answers": File("prompts/alpaca_gpt4.jsonl", "JSONL", "answers that give CP's output lengths (simulation)"),
    "chatbot": File("prompts/gpteacher.jsonl", "JSONL", "chatbot instruction prompts, CIP (simulation)"),
    "code": File("prompts/mbpp.jsonl", "JSONL", "code (engine)"),
    "maths": File("prompts/gsm8k.jsonl", "JSONL", "maths (engine)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--verification", action="store_true", help="compare packed and padded steps (Fig. 12)")
    kind.add_argument("--pipeline", action="store_true", help="measure micro-batches on the engine (Fig. 13)")
    add_data(parser)
    spin_engine.add_arguments(parser)
    spin_pipeline.add_arguments(parser)
    add_verification(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("load")
    options.add_numbers(data, ("--jobs N", 96, "simulation: requests per run"))


def add_verification(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verification (Fig. 12)")
    group.add_argument(
        "--mixed", nargs="+", default=[], metavar="JSONL",
        help='further files, mixed equally with --alpaca and --chat; conversations have "replies"',
    )  # fmt: skip
    answers = f"column output_tokens: lengths of missing answers (default: uniform 1 … {UNKNOWN})"
    group.add_argument("--answers", metavar="CSV", help=answers)
    sizes = "batch sizes (default: 4 8 16 32)"
    group.add_argument("--batches", type=options.count, nargs="+", default=[4, 8, 16, 32], metavar="N", help=sizes)
    options.add_numbers(
        group,
        ("--context N", 2048, "longest request in tokens"),
        ("--drafts N", 4, "draft tokens per request: uniform from 0 to this"),
        ("--rows N", 2, "rows per request of SPIN's decomposition"),
        ("--runs N", 7, "timed runs of each batch"),
    )


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    if args.data or not (args.engine or args.pipeline or args.verification):  # those have prompts of their own
        page.find_files(args, FILES)
    if args.engine:
        kind, numbers = "engine", spin_engine.on_engine(args)
    elif args.pipeline:
        kind, numbers = "pipeline", spin_pipeline.pipelined(args)
    elif args.verification:
        from jaxspec.bench.papers.spin.verification import verification

        kind, numbers = "verification", verification(args)
    else:
        try:
            datasets = read_datasets(args)
        except (OSError, ValueError) as error:
            raise BenchError(explained(error)) from None
        kind, numbers = "simulated", simulated(args, page.runs(args), datasets)
    report.draw(Path(args.out), page.publish(args, "spin", TITLE, kind, numbers, report.sections))
