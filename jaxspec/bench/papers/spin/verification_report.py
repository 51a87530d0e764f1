"""Tables and figure of SPIN's batch verification, next to the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import plot
from jaxspec.bench.estimates import Estimate, interval
from jaxspec.bench.estimates import ratio as paired_ratio
from jaxspec.bench.table import TIMES, each, markdown, share, walk

WAYS = PACKED, KV_PADDED, PADDED = "packed", "KV padded", "KV and queries padded"
#: §VI-B: milliseconds without and with SPIN's batch verification, as a ratio. The text calls that a
#: reduction of 33.61 %; these numbers give 36.6 %.
PAPER = {"Alpaca, 16": 529.21 / 335.46}
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
        kind: {way: {size: mean(batches, "ms", way) for size, batches in sizes.items()} for way in WAYS}
        for kind, sizes in found["points"].items()
    }
    plot.curves(out / "spin_verification.png", panels, "batch size", "verification, ms")


def column(batches: Batches, *keys: str) -> np.ndarray:
    """The value under these nested keys for each batch `[batches]`."""
    return np.array([reduce(getitem, keys, batch) for batch in batches], float)


def mean(batches: Batches, *keys: str) -> float:
    return float(column(batches, *keys).mean())


def slower(batches: Batches, way: str) -> Estimate | None:
    """Milliseconds of this way relative to packed verification: the mean of the batches' ratios."""
    return paired_ratio(*(column(batches, "ms", one).tolist() for one in (way, PACKED)))


def memory_ratio(batches: Batches, way: str) -> str:
    """Mean KV of this way relative to the mean of packed verification, and the range of the ratio over the batches."""
    own, packed = column(batches, "kv_bytes", way), column(batches, "kv_bytes", PACKED)
    ratios = own / packed
    return f"{own.mean() / packed.mean():.2f}× ({ratios.min():.2f} … {ratios.max():.2f})"


def padding_of(needed: np.ndarray, total: np.ndarray) -> float:
    """Share of padding over all batches."""
    return 1 - float(needed.sum() / total.sum())


def by_size(found: Mapping[str, Any], row: Callable[[Batches], Sequence[Any]]) -> list[Sequence[Any]]:
    """A row for every kind of requests and batch size."""
    return [[f"{kind}, {size}", *row(batches)] for kind, size, batches in walk(found["points"], 2)]


def latency(found: Mapping[str, Any]) -> str:
    """Mean times over the batches, as in the paper, and the means of the batches' ratios with 95 % intervals."""
    rows = by_size(found, lambda batches: [
        *(mean(batches, "ms", way) for way in WAYS), *(slower(batches, way) for way in WAYS[1:]),
    ])  # fmt: skip
    return markdown(
        ([*row, PAPER.get(row[0])] for row in rows), "verification, ms", *each(WAYS, "{:.1f}"),
        *each((f"{way} / {PACKED}" for way in WAYS[1:]), interval(TIMES)), ("paper", TIMES),
    )  # fmt: skip


def padding(found: Mapping[str, Any]) -> str:
    """Shares of padding in what is read and computed, and the ratio of padded to packed."""

    def row(batches: Batches) -> list[float]:
        needed, real = column(batches, "needed"), column(batches, "real_tokens")
        (packed, padded), (tokens, padded_tokens) = (
            [column(batches, what, way) for way in (PACKED, PADDED)] for what in ("positions", "tokens")
        )
        lengths = [batch["committed"] for batch in batches]
        return [
            float(np.concatenate(lengths).mean()), float(np.mean([max(own) for own in lengths])),
            padding_of(needed, packed), padding_of(needed, padded),
            padding_of(2 * needed, packed + column(batches, "values", PACKED)),
            padding_of(needed, column(batches, "elsewhere")),
            padding_of(real, tokens), padding_of(real, padded_tokens),
            padded.sum() / packed.sum(), padded_tokens.sum() / tokens.sum(),
        ]  # fmt: skip

    shares = (
        "KV positions: packed", "padded", "keys and values: packed", "KV positions: packed, XLA attention",
        "tokens: packed", "padded",
    )  # fmt: skip
    return markdown(
        by_size(found, row), "padding", *each(("positions: mean", "longest"), "{:.0f}"), *each(shares, share),
        *each(("KV positions, padded / packed", "tokens, padded / packed"), TIMES),
    )  # fmt: skip


def memory(found: Mapping[str, Any]) -> str:
    parts = [(what, way) for what in ("kv_bytes", "temporaries") for way in (PACKED, PADDED)]
    return markdown(
        by_size(found, lambda own: [*(mean(own, *part) / MIB for part in parts), memory_ratio(own, PADDED)]),
        "memory, MiB", *each(("KV: packed", "padded", "temporaries: packed", "padded"), "{:.0f}"),
        "KV, padded / packed",
    )  # fmt: skip


def search(found: Mapping[str, Any]) -> str:
    """Mean padding over the batches: of the engine, and of the best L that SPIN's search could find."""

    def row(batches: Batches) -> list[Any]:
        needed, lengths = mean(batches, "needed"), column(batches, "search", "any", "length")
        return [
            mean(batches, "positions", PADDED) - needed, mean(batches, "search", "any", "padded"),
            mean(batches, "search", "lanes", "padded"), mean(batches, "positions", PACKED) - needed,
            mean(batches, "elsewhere") - needed, f"{lengths.min():.0f} … {lengths.max():.0f}",
            1e3 * float(np.median(column(batches, "search", "ms"))),
        ]  # fmt: skip

    padded = "padded to the longest", "best L", "best L, multiples of 16", "engine", "engine, XLA attention"
    return markdown(
        by_size(found, row), "padded positions per batch", *each(padded, "{:.0f}"), "range of the best L",
        ("search, µs", "{:.0f}"),
    )  # fmt: skip
