"""Tables and figure of SPIN's batch verification, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.papers import page
from jaxspec.bench.papers.spin.options import KV_PADDED, PACKED, PADDED

WAYS = (PACKED, KV_PADDED, PADDED)
#: §VI-B: milliseconds without and with SPIN's batch verification, by (kind of requests, batch size). The text calls
#: that a reduction of 33.61 %; these numbers give 36.6 %.
PAPER = {("Alpaca", "16"): (529.21, 335.46)}
MIB = 2**20

Batches = Sequence[Mapping[str, Any]]


def sections(found: Mapping[str, Any]) -> dict[str, str]:
    """The page's tables by name, from the numbers of `verification.verification`."""
    return {
        "verification": latency(found), "verification padding": padding(found), "verification memory": memory(found),
        "verification search": search(found),
    }  # fmt: skip


def draw(out: Path, found: Mapping[str, Any]) -> None:
    """Draw Fig. 12: milliseconds per step by batch size."""
    panels = {
        kind: {way: [(float(n), mean(batches, "ms", way)) for n, batches in sizes.items()] for way in WAYS}
        for kind, sizes in found["points"].items()
    }
    plot.curves(out / "spin_verification.png", panels, "batch size", "verification, ms")


def column(batches: Batches, *keys: str) -> np.ndarray:
    """The value under these nested keys for each batch `[batches]`."""
    values: Sequence[Any] = batches
    for key in keys:
        values = [value[key] for value in values]
    return np.array(values, float)


def mean(batches: Batches, *keys: str) -> float:
    return float(column(batches, *keys).mean())


def ratio(batches: Batches, way: str, what: str = "ms") -> float:
    """Mean of this way relative to the mean of packed verification."""
    return mean(batches, what, way) / mean(batches, what, PACKED)


def spread(batches: Batches, way: str, what: str = "ms") -> str:
    """`ratio`, and the range of the ratio over the batches."""
    ratios = column(batches, what, way) / column(batches, what, PACKED)
    return f"{ratio(batches, way, what):.2f}× ({ratios.min():.2f} … {ratios.max():.2f})"


def padding_of(needed: np.ndarray, total: np.ndarray) -> str:
    """Share of padding over all batches."""
    return page.percent(100 * (1 - float(needed.sum() / total.sum())))


def points(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Batches]]:
    """(kind of requests, batch size, batches)."""
    for kind, sizes in found["points"].items():
        for size, batches in sizes.items():
            yield kind, size, batches


def latency(found: Mapping[str, Any]) -> str:
    """Mean times over the batches, as in the paper, and the range of each ratio within a batch."""
    rows = []
    for kind, size, batches in points(found):
        times = [f"{mean(batches, 'ms', way):.1f}" for way in WAYS]
        gains = [spread(batches, way) for way in WAYS[1:]]
        paper = PAPER.get((kind, size))
        rows.append([f"{kind}, {size}", *times, *gains, page.times(paper and paper[0] / paper[1])])
    header = ["verification, ms", *WAYS, *(f"{way} / {PACKED}" for way in WAYS[1:]), "paper"]
    return page.table(header, rows)


def padding(found: Mapping[str, Any]) -> str:
    """Shares of padding in what is read and computed, and the ratio of padded to packed."""
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
            *(padding_of(needed, total) for total in positions),
            padding_of(2 * needed, positions[0] + column(batches, "values", PACKED)),
            padding_of(needed, column(batches, "elsewhere")),
            *(padding_of(real, total) for total in tokens),
            *(page.times(float(padded.sum() / packed.sum())) for packed, padded in (positions, tokens)),
        ])  # fmt: skip
    header = [
        "padding", "positions: mean", "longest", "KV positions: packed", "padded", "keys and values: packed",
        "KV positions: packed, XLA attention", "tokens: packed", "padded", "KV positions, padded / packed",
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
    """Mean padding over the batches: of the engine, and of the best L that SPIN's search could find."""
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
            f"{kind}, {size}", *(f"{cell.mean():.0f}" for cell in cells), f"{lengths.min():.0f} … {lengths.max():.0f}",
            f"{took:.0f}",
        ])  # fmt: skip
    header = [
        "padded positions per batch", "padded to the longest", "best L", "best L, multiples of 16", "engine",
        "engine, XLA attention", "range of the best L", "search, µs",
    ]  # fmt: skip
    return page.table(header, rows)
