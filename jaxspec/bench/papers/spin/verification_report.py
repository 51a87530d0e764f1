"""The tables and the figure of SPIN's batch verification, beside what the paper says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin.options import KV_PADDED, PACKED, PADDED

WAYS = (PACKED, KV_PADDED, PADDED)
#: Milliseconds of §VI-B, without and with SPIN's batch verification, by kind of requests and their number. The text
#: calls that a reduction by 33.61 %; these numbers are 36.6 %.
PAPER = {("Alpaca", "16"): (529.21, 335.46)}
MIB = 2**20

Batches = Sequence[Mapping[str, Any]]


def sections(found: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables, of what `spin_verification.verification` gives."""
    return {
        "verification": latency(found), "verification padding": padding(found), "verification memory": memory(found),
        "verification search": search(found),
    }  # fmt: skip


def draw(out: Path, found: Mapping[str, Any]) -> None:
    """Fig. 12: milliseconds of a step by batch size."""
    panels = {
        kind: {way: [(float(n), mean(batches, "ms", way)) for n, batches in sizes.items()] for way in WAYS}
        for kind, sizes in found["points"].items()
    }
    plot.curves(out / "spin_verification.png", panels, "requests in the batch", "verification, ms")


def column(batches: Batches, *keys: str) -> np.ndarray:
    """What is behind these keys, of each batch."""
    values: Sequence[Any] = batches
    for key in keys:
        values = [value[key] for value in values]
    return np.array(values, float)


def mean(batches: Batches, *keys: str) -> float:
    return float(column(batches, *keys).mean())


def ratio(batches: Batches, way: str, what: str = "ms") -> float:
    """How many times as much as packed verification this way takes on average."""
    return mean(batches, what, way) / mean(batches, what, PACKED)


def spread(batches: Batches, way: str, what: str = "ms") -> str:
    """`ratio`, and the range over the batches."""
    each = column(batches, what, way) / column(batches, what, PACKED)
    return f"{ratio(batches, way, what):.2f}× ({each.min():.2f} … {each.max():.2f})"


def padding_of(needed: np.ndarray, there: np.ndarray) -> str:
    """The share of padding over all batches."""
    return page.percent(100 * (1 - float(needed.sum() / there.sum())))


def points(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Batches]]:
    """Kind, size and batches."""
    for kind, sizes in found["points"].items():
        for size, batches in sizes.items():
            yield kind, size, batches


def latency(found: Mapping[str, Any]) -> str:
    """Means over the batches, as the paper's; the ranges are of ratios on the same batch."""
    rows = []
    for kind, size, batches in points(found):
        times = [f"{mean(batches, 'ms', way):.1f}" for way in WAYS]
        gains = [spread(batches, way) for way in WAYS[1:]]
        paper = PAPER.get((kind, size))
        rows.append([f"{kind}, {size}", *times, *gains, page.times(paper and paper[0] / paper[1])])
    header = ["verification, ms", *WAYS, *(f"{way} / {PACKED}" for way in WAYS[1:]), "paper"]
    return page.table(header, rows)


def padding(found: Mapping[str, Any]) -> str:
    """Shares of what is read and computed; and how much more of it padding makes."""
    rows = []
    for kind, size, batches in points(found):
        needed, real = column(batches, "needed"), column(batches, "real_tokens")
        positions, tokens = (
            [column(batches, what, way) for way in (PACKED, PADDED)] for what in ("positions", "tokens")
        )
        lengths = np.concatenate([batch["committed"] for batch in batches])
        longest = np.mean([max(batch["committed"]) for batch in batches])
        rows.append([
            f"{kind}, {size}", f"{lengths.mean():.0f}", f"{longest:.0f}",
            *(padding_of(needed, own) for own in positions),
            padding_of(2 * needed, positions[0] + column(batches, "values", PACKED)),
            padding_of(needed, column(batches, "elsewhere")),
            *(padding_of(real, own) for own in tokens),
            *(page.times(float(own[1].sum() / own[0].sum())) for own in (positions, tokens)),
        ])  # fmt: skip
    header = [
        "padding", "positions: mean", "longest", "KV positions: packed", "padded", "keys and values: packed",
        "KV positions: packed, not on a CPU", "tokens: packed", "padded", "KV positions, padded / packed",
        "tokens, padded / packed",
    ]  # fmt: skip
    return page.table(header, rows)


def memory(found: Mapping[str, Any]) -> str:
    rows = []
    for kind, size, batches in points(found):
        parts = [(what, way) for what in ("kv_bytes", "temporaries") for way in (PACKED, PADDED)]
        cells = [f"{mean(batches, *part) / MIB:.0f}" for part in parts]
        rows.append([f"{kind}, {size}", *cells, spread(batches, PADDED, "kv_bytes")])
    header = ["memory, MiB", "KV: packed", "padded", "temporaries: packed", "padded", "KV, padded / packed"]
    return page.table(header, rows)


def search(found: Mapping[str, Any]) -> str:
    """Means over the batches; what the engine leaves, and what SPIN's search would at best."""
    rows = []
    for kind, size, batches in points(found):
        needed = column(batches, "needed")
        cells = [
            column(batches, "positions", PADDED) - needed, column(batches, "search", "any", "padded"),
            column(batches, "search", "lanes", "padded"), column(batches, "positions", PACKED) - needed,
            column(batches, "elsewhere") - needed,
        ]  # fmt: skip
        lengths = column(batches, "search", "any", "length")
        took = 1e3 * float(np.median(column(batches, "search", "ms")))
        rows.append([
            f"{kind}, {size}", *(f"{own.mean():.0f}" for own in cells), f"{lengths.min():.0f} … {lengths.max():.0f}",
            f"{took:.0f}",
        ])  # fmt: skip
    header = [
        "padded positions a batch", "to the longest", "best L", "best L of 16s", "engine", "engine, not on a CPU",
        "the best L", "search, µs",
    ]  # fmt: skip
    return page.table(header, rows)
