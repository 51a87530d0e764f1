"""Options of SPIN's experiments, and the names that its verification's tables share; without JAX."""

from __future__ import annotations

import argparse

from jaxspec.bench import options

PACKED, KV_PADDED, PADDED = "packed", "KV padded", "KV and queries padded"
#: Most tokens of answers whose length nobody tells.
UNKNOWN = 256


def add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data", 'Files of {"turns": [text, ...], "reference": text} a line.')
    for name, what in (
        ("alpaca", "Alpaca"), ("chat", "ChatGPT prompts (CP); answers may be missing"),
        ("chat-answers", "of the simulation: whose answers are as long as CP's"),
        ("chatbot", "of the simulation: chatbot instruction prompts (CIP)"),
        ("code", "of --engine: code"), ("maths", "of --engine: maths"),
    ):  # fmt: skip
        data.add_argument(f"--{name}", metavar="JSONL", help=what)
    data.add_argument("--jobs", type=options.count, default=96, metavar="N", help="simulated requests of a run (96)")


def add_verification(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verification (Fig. 12)")
    group.add_argument(
        "--mixed", nargs="+", default=[], metavar="JSONL",
        help='these, --alpaca and --chat together, as often each; conversations have "replies"',
    )  # fmt: skip
    group.add_argument("--answers", metavar="CSV", help=f"output_tokens, for answers that are missing (1 … {UNKNOWN})")
    group.add_argument("--context", type=options.count, default=2048, help="longest request in tokens (2048)")
    group.add_argument("--batches", type=options.count, nargs="+", default=[4, 8, 16, 32], metavar="N")
    group.add_argument("--drafts", type=options.count, default=4, help="most of a request, from none on (4)")
    group.add_argument("--rows", type=options.count, default=2, help="of SPIN's decomposition, by requests (2)")
    group.add_argument("--runs", type=options.count, default=7, help="timed ones of each batch (7)")
