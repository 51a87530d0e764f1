"""AdaServe's workload (§6.1): three categories of requests with different TPOT targets.

The targets of its Table 2 for Llama-2-7b: strict requests at the server's baseline TPOT (12.5 ms), search at 30 ms,
chat at 100 ms. Other models and machines use the same multiples of their own baseline.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import httpx
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.client import Endpoint, ask
from jaxspec.bench.report import Distribution, Report, Sample, Slo
from jaxspec.bench.table import each, terminal

#: Category -> TPOT target as a multiple of the baseline.
FACTORS = {"strict": 1.0, "search": 30 / 12.5, "chat": 100 / 12.5}
#: Name of the row for all categories together.
ALL = "all"
#: Load of the baseline measurement: concurrent requests, prompt tokens, output tokens.
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 32, 128
#: Default prompt tokens of search requests, and maximum words in the prompts of the other categories.
_SEARCH_TOKENS, _MAX_WORDS = 512, 48
_SUMMARISE = "Summarise this in three sentences:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mix = parser.add_argument_group(
        "AdaServe's request mix",
        "Three categories of requests, each with a target for the mean time per output token (slo.tpot_ms): strict"
        " at the server's baseline, search at 2.4 times and chat at 8 times the baseline. These are the paper's 12.5,"
        " 30 and 100 ms for Llama-2-7b. With --trace only its arrival times are used.",
    )
    mix.add_argument(
        "--slo-mix", type=shares, nargs="?", const=shares("60:20:20"), metavar="STRICT:SEARCH:CHAT",
        help="send this mix; the value has the shares of the categories (60:20:20 without a value). Search requests"
        " summarise long texts, the others have short prompts",
    )  # fmt: skip
    mix.add_argument(
        "--baseline-tpot-ms", type=options.finite, metavar="MS",
        help="baseline TPOT (default: measured before the run with eight concurrent requests of 32 input and 128 output"
        " tokens). The paper's baseline is a server without speculation; to compare servers, use one value for all",
    )  # fmt: skip
    mix.add_argument(
        "--strict-factor", type=options.finite, metavar="X",
        help="TPOT target of strict requests as a multiple of the baseline (default: 1; the paper's Fig. 10 includes"
        " 0.8)",
    )  # fmt: skip
    mix.add_argument(
        "--search-tokens", type=options.count, metavar="N",
        help=f"prompt tokens of search requests (default: {_SEARCH_TOKENS})",
    )  # fmt: skip


def shares(text: str) -> tuple[float, ...]:
    """`STRICT:SEARCH:CHAT` as three numbers, which need not sum to 1."""
    try:
        values = tuple(float(part) for part in text.split(":"))
    except ValueError:
        values = ()
    if len(values) != len(FACTORS) or not all(0 <= v < float("inf") for v in values) or not sum(values):
        raise argparse.ArgumentTypeError(f"must be three shares such as 60:20:20, got {text}")
    return values


@dataclass(frozen=True, slots=True)
class SloMix:
    """Shares of the categories, TPOT targets as multiples of the baseline, prompt tokens of search requests, and the
    baseline TPOT in seconds (None: measure it)."""

    shares: Sequence[float]
    factors: Mapping[str, float]
    search_tokens: int
    baseline: float | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> SloMix | None:
        """The mix given by the options; None without `--slo-mix`. Raises `BenchError` naming an incompatible option."""
        dependent = ("baseline_tpot_ms", "strict_factor", "search_tokens")
        incompatible = ("slo_tpot_ms", "slo_ttft_ms", "input_tokens")
        for name in incompatible if args.slo_mix else dependent:
            if getattr(args, name) is not None:
                problem = "cannot be combined with --slo-mix" if args.slo_mix else "needs --slo-mix"
                raise BenchError(f"--{name.replace('_', '-')} {problem}")
        if not args.slo_mix:
            return None
        factors = FACTORS | ({"strict": args.strict_factor} if args.strict_factor else {})
        baseline = args.baseline_tpot_ms and args.baseline_tpot_ms / 1e3
        return cls(args.slo_mix, factors, args.search_tokens or _SEARCH_TOKENS, baseline)

    def requests(self, texts: Sequence[str], count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """(category, prompt) of `count` requests in random order, with the categories in proportion to their shares."""
        short = [t for t in texts if len(t.split()) <= _MAX_WORDS] or [" ".join(t.split()[:_MAX_WORDS]) for t in texts]
        chosen = prompts.choose(short, count, rng)
        names = np.repeat(list(self.factors), apportion(self.shares, count))
        out: list[tuple[str, str]] = []
        for name, text in zip(rng.permutation(names).tolist(), chosen, strict=True):
            if name == "search":
                start = int(rng.integers(len(texts)))
                text = f"{_SUMMARISE} {prompts.of_words(texts, prompts.words(self.search_tokens), start)}"
            out.append((name, text))
        return out

    async def targets(self, http: httpx.AsyncClient, server: Endpoint) -> dict[str, float]:
        """Category -> TPOT target in milliseconds. Raises `BenchError` if the baseline cannot be measured."""
        baseline = self.baseline or await measure(http, server)
        return {name: 1e3 * baseline * factor for name, factor in self.factors.items()}

    def add_results(self, report: Report, targets: Mapping[str, float]) -> None:
        """Add SLO attainment, goodput and the rows of the categories to the report, and print the rows."""
        by_category = rows(report.samples, targets, report.duration_s)
        report.slo_attainment = by_category[ALL].slo_attainment
        report.goodput_tokens_per_s = by_category[ALL].goodput_tokens_per_s
        report.extra["slo_mix"] = {
            "baseline_tpot_ms": targets["chat"] / self.factors["chat"],
            "baseline_measured": self.baseline is None,
            "categories": {name: asdict(row) for name, row in by_category.items()},
        }
        print_rows(by_category)


def apportion(shares: Sequence[float], count: int) -> list[int]:
    """Split `count` into integers in proportion to `shares`, by the largest remainder method."""
    exact = [count * share / sum(shares) for share in shares]
    whole = [int(value) for value in exact]
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: count - sum(whole)]:
        whole[i] += 1
    return whole


async def measure(http: httpx.AsyncClient, server: Endpoint) -> float:
    """The server's median TPOT in seconds under the light load of the paper's baseline. Raises `BenchError`."""
    endpoint = replace(server, fields={**server.fields, "ignore_eos": True})
    texts = [prompts.of_words(prompts.PROMPTS, prompts.words(INPUT_TOKENS), 3 * i) for i in range(REQUESTS)]
    samples = await asyncio.gather(*(ask(http, endpoint, text, OUTPUT_TOKENS) for text in texts))
    tpots = [s.tpot for s in samples if s.tpot]
    if len(tpots) < REQUESTS:
        why = next((s.error for s in samples if s.error), "a response has only one token")
        raise BenchError(f"the baseline TPOT cannot be measured ({why}); set it with --baseline-tpot-ms")
    return median(tpots)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one category. Times in milliseconds; None if no request has a value."""

    requests: int
    failed: int
    #: None for all categories together.
    target_tpot_ms: float | None
    #: Share of the requests, failed ones included, whose mean TPOT met the target; None without requests.
    slo_attainment: float | None
    #: Output tokens per second of the requests that met the target.
    goodput_tokens_per_s: float
    tpot_ms: Distribution | None
    ttft_ms: Distribution | None


def rows(samples: Sequence[Sample], targets: Mapping[str, float], duration: float) -> dict[str, Row]:
    """A row for each category and for `ALL`. `targets` in milliseconds, `duration` in seconds."""

    def row(members: Sequence[Sample], target: float | None) -> Row:
        met = [s for s in members if s.category and Slo(tpot_ms=targets[s.category]).met_by(s)]
        done = [s for s in members if s.error is None]
        return Row(
            requests=len(members),
            failed=len(members) - len(done),
            target_tpot_ms=target,
            slo_attainment=len(met) / len(members) if members else None,
            goodput_tokens_per_s=sum(s.output_tokens for s in met) / duration if duration > 0 else 0.0,
            tpot_ms=Distribution.of(s.tpot for s in done),
            ttft_ms=Distribution.of(s.ttft for s in done),
        )

    by_category = {name: row([s for s in samples if s.category == name], target) for name, target in targets.items()}
    return by_category | {ALL: row(samples, None)}


def print_rows(by_category: Mapping[str, Row], console: Console | None = None) -> None:
    """Print one row per category."""
    rows = (
        [name, row.requests, row.target_tpot_ms, row.slo_attainment, row.goodput_tokens_per_s]
        + [d and getattr(d, part) for d in (row.tpot_ms, row.ttft_ms) for part in ("mean", "p95")]
        for name, row in by_category.items()
    )
    columns = ("TPOT\nSLO", "{:,.1f}"), ("SLOs\nmet", "{:.1%}")
    numbers = each(("goodput\ntokens/s", "TPOT\nmean", "TPOT\np95", "TTFT\nmean", "TTFT\np95"), "{:,.1f}")
    # Narrow enough for a terminal of 80 columns.
    table = terminal(
        rows, "category", "requests", *columns, *numbers, title="AdaServe's request mix; times in ms",
        box=SIMPLE_HEAD, padding=0,
    )  # fmt: skip
    (console or Console()).print(table)
