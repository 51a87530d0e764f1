"""Requests of three categories with a target each for the time per output token (TPOT): AdaServe's workload (§6.1).

Its Table 2 for Llama-2-7b: strict requests at the server's baseline (12.5 ms there), search at 30 ms, chat at 100 ms.
Other models and machines take the same multiples of their own baseline.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.client import Endpoint, ask
from jaxspec.bench.report import Distribution, Report, Sample, Slo

#: Category -> its target as a multiple of the baseline.
FACTORS = {"strict": 1.0, "search": 30 / 12.5, "chat": 100 / 12.5}
#: The name of all categories together.
ALL = "all"
#: What the baseline is measured with: requests at once, tokens of a prompt, tokens of an answer.
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 32, 128
#: Tokens of a search's prompt unless said otherwise, and most words of the other prompts.
_SEARCH_TOKENS, _SHORT = 512, 48
_SUMMARISE = "Summarise this in three sentences:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mix = parser.add_argument_group(
        "AdaServe's mix",
        "Three categories of requests, each with a target for its mean time per output token (slo.tpot_ms): strict"
        " at the server's baseline, search at 2.4 and chat at 8 times that, which are the paper's 12.5, 30 and"
        " 100 ms for Llama-2-7b. Of a trace only the arrivals are used.",
    )
    mix.add_argument(
        "--slo-mix", type=shares, nargs="?", const=shares("60:20:20"), metavar="STRICT:SEARCH:CHAT",
        help="shares of requests (60:20:20 if none are given); search summarises long texts, the others are short",
    )  # fmt: skip
    mix.add_argument(
        "--baseline-tpot-ms", type=options.finite, metavar="MS",
        help="default: measured first, with eight requests at once, 32 tokens in and 128 out. The paper's is of a"
        " server without speculation: to compare servers, give all of them the same",
    )  # fmt: skip
    mix.add_argument(
        "--strict-factor", type=options.finite, metavar="X",
        help="the strict target as a multiple of the baseline (default: 1; 0.8 is in the paper's Fig. 10)",
    )  # fmt: skip
    mix.add_argument(
        "--search-tokens", type=options.count, metavar="N", help=f"of a search's prompt (default: {_SEARCH_TOKENS})"
    )


def shares(text: str) -> tuple[float, ...]:
    """`STRICT:SEARCH:CHAT`, in any unit."""
    try:
        values = tuple(float(part) for part in text.split(":"))
    except ValueError:
        values = ()
    if len(values) != len(FACTORS) or not all(0 <= v < float("inf") for v in values) or not sum(values):
        raise argparse.ArgumentTypeError(f"must be three shares as in 60:20:20, not {text}")
    return values


@dataclass(frozen=True, slots=True)
class SloMix:
    """What to ask for: shares of the categories, their targets as multiples of the baseline, tokens of a search's
    prompt, and the baseline in seconds a token, None: to be measured."""

    shares: Sequence[float]
    factors: Mapping[str, float]
    search_tokens: int
    baseline: float | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> SloMix | None:
        """None where no mix is asked for. Raises `BenchError` naming an option that does not go with the others."""
        own = ("baseline_tpot_ms", "strict_factor", "search_tokens")
        replaced = ("slo_tpot_ms", "slo_ttft_ms", "input_tokens")
        for name in replaced if args.slo_mix else own:
            if getattr(args, name) is not None:
                wrong = "does not go with --slo-mix" if args.slo_mix else "needs --slo-mix"
                raise BenchError(f"--{name.replace('_', '-')} {wrong}")
        if not args.slo_mix:
            return None
        factors = FACTORS | ({"strict": args.strict_factor} if args.strict_factor else {})
        given = args.baseline_tpot_ms and args.baseline_tpot_ms / 1e3
        return cls(args.slo_mix, factors, args.search_tokens or _SEARCH_TOKENS, given)

    def requests(self, texts: Sequence[str], count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """(category, prompt) of `count` requests: as many of each category as its share says, in random order."""
        short = [t for t in texts if len(t.split()) <= _SHORT] or [" ".join(t.split()[:_SHORT]) for t in texts]
        asked = prompts.choose(short, count, rng)
        names = np.repeat(list(self.factors), apportion(self.shares, count))
        out: list[tuple[str, str]] = []
        for name, text in zip(rng.permutation(names).tolist(), asked, strict=True):
            if name == "search":
                start = int(rng.integers(len(texts)))
                text = f"{_SUMMARISE} {prompts.of_words(texts, prompts.words(self.search_tokens), start)}"
            out.append((name, text))
        return out

    async def targets(self, http: httpx.AsyncClient, server: Endpoint) -> dict[str, float]:
        """Category -> TPOT in milliseconds. Raises `BenchError` where the baseline cannot be measured."""
        baseline = self.baseline or await measure(http, server)
        return {name: 1e3 * baseline * factor for name, factor in self.factors.items()}

    def add_results(self, report: Report, targets: Mapping[str, float]) -> None:
        """Put the categories into the report, and show them."""
        found = rows(report.samples, targets, report.duration_s)
        report.slo_attainment, report.goodput_tokens_per_s = found[ALL].slo_attainment, found[ALL].goodput_tokens_per_s
        report.extra["slo_mix"] = {
            "baseline_tpot_ms": targets["chat"] / self.factors["chat"],
            "baseline_measured": self.baseline is None,
            "categories": {name: asdict(row) for name, row in found.items()},
        }
        print_rows(found)


def apportion(shares: Sequence[float], count: int) -> list[int]:
    """`count` in whole numbers by these shares; what rounding down leaves goes to the largest remainders."""
    exact = [count * share / sum(shares) for share in shares]
    whole = [int(value) for value in exact]
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: count - sum(whole)]:
        whole[i] += 1
    return whole


async def measure(http: httpx.AsyncClient, server: Endpoint) -> float:
    """The server's median TPOT in seconds under the small load of the paper's baseline. Raises `BenchError`."""
    asking = replace(server, fields={**server.fields, "ignore_eos": True})
    texts = [prompts.of_words(prompts.PROMPTS, prompts.words(INPUT_TOKENS), 3 * i) for i in range(REQUESTS)]
    samples = await asyncio.gather(*(ask(http, asking, text, OUTPUT_TOKENS) for text in texts))
    found = [s.tpot for s in samples if s.tpot]
    if len(found) < REQUESTS:
        why = next((s.error for s in samples if s.error), "answers of one token")
        raise BenchError(f"the baseline cannot be measured, give it with --baseline-tpot-ms: {why}")
    return median(found)


@dataclass(frozen=True, slots=True)
class Row:
    """What the requests of one category got. Times in milliseconds, None where no request gave any."""

    requests: int
    failed: int
    #: None for all categories together.
    target_tpot_ms: float | None
    #: Share of the requests, failed ones included, whose mean TPOT was within the target; None without requests.
    slo_attainment: float | None
    #: Output tokens a second of those.
    goodput_tokens_per_s: float
    tpot_ms: Distribution | None
    ttft_ms: Distribution | None


def rows(samples: Sequence[Sample], targets: Mapping[str, float], duration: float) -> dict[str, Row]:
    """By category, and of `ALL`. `targets` in milliseconds, `duration` in seconds."""

    def row(own: Sequence[Sample], target: float | None) -> Row:
        met = [s for s in own if s.category and Slo(tpot_ms=targets[s.category]).met_by(s)]
        done = [s for s in own if s.error is None]
        return Row(
            requests=len(own),
            failed=len(own) - len(done),
            target_tpot_ms=target,
            slo_attainment=len(met) / len(own) if own else None,
            goodput_tokens_per_s=sum(s.output_tokens for s in met) / duration if duration > 0 else 0.0,
            tpot_ms=Distribution.of(s.tpot for s in done),
            ttft_ms=Distribution.of(s.ttft for s in done),
        )

    found = {name: row([s for s in samples if s.category == name], target) for name, target in targets.items()}
    return found | {ALL: row(samples, None)}


def print_rows(found: Mapping[str, Row], console: Console | None = None) -> None:
    columns = ("requests", "target ms", "SLO attainment", "goodput tokens/s", "TPOT mean", "p95", "TTFT mean", "p95")
    table = Table("category", *columns, title="AdaServe's mix", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def shown(value: float | None, form: str = "{:,.1f}") -> str:
        return "" if value is None else form.format(value)

    for name, row in found.items():
        times = [shown(d and getattr(d, part)) for d in (row.tpot_ms, row.ttft_ms) for part in ("mean", "p95")]
        attained = shown(row.slo_attainment, "{:.1%}")
        goodput = shown(row.goodput_tokens_per_s)
        table.add_row(name, str(row.requests), shown(row.target_tpot_ms), attained, goodput, *times)
    (console or Console()).print(table)
