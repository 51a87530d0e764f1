"""Options of SPIN's experiments, and names shared by the verification's tables. Does not import JAX."""

from __future__ import annotations

import argparse

from jaxspec.bench import options

PACKED, KV_PADDED, PADDED = "packed", "KV padded", "KV and queries padded"
#: Maximal tokens of answers of unknown length.
UNKNOWN = 256


def add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data", 'Files with lines of {"turns": [text, ...], "reference": text}.')
    for name, what in (
        ("alpaca", "Alpaca"), ("chat", "ChatGPT prompts (CP); answers may be missing"),
        ("chat-answers", "simulation: answers that give CP's output lengths"),
        ("chatbot", "simulation: chatbot instruction prompts (CIP)"),
        ("code", "with --engine: code"), ("maths", "with --engine: maths"),
    ):  # fmt: skip
        data.add_argument(f"--{name}", metavar="JSONL", help=what)
    jobs = "simulation: requests per run (default: 96)"
    data.add_argument("--jobs", type=options.count, default=96, metavar="N", help=jobs)


def add_verification(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verification (Fig. 12)")
    group.add_argument(
        "--mixed", nargs="+", default=[], metavar="JSONL",
        help='further files, mixed equally with --alpaca and --chat; conversations have "replies"',
    )  # fmt: skip
    answers = f"column output_tokens: lengths of missing answers (default: uniform 1 … {UNKNOWN})"
    group.add_argument("--answers", metavar="CSV", help=answers)
    context = "longest request in tokens (default: 2048)"
    group.add_argument("--context", type=options.count, default=2048, help=context)
    sizes = "batch sizes (default: 4 8 16 32)"
    group.add_argument("--batches", type=options.count, nargs="+", default=[4, 8, 16, 32], metavar="N", help=sizes)
    drafts = "draft tokens per request: uniform from 0 to this (default: 4)"
    group.add_argument("--drafts", type=options.count, default=4, help=drafts)
    rows = "rows per request of SPIN's decomposition (default: 2)"
    group.add_argument("--rows", type=options.count, default=2, help=rows)
    group.add_argument("--runs", type=options.count, default=7, help="timed runs of each batch (default: 7)")
