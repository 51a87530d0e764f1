"""The lattice of step shapes and their compilation ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from jaxspec.step.batch import ITEM_TILE, BatchShape

T = TypeVar("T")

#: Token counts a step may have. A finer ladder wastes fewer tokens, but each shape costs seconds of compiling.
BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def lattice(
    max_tokens: int, max_requests: int, segments: tuple[int, ...], buckets: Iterable[int] | None = None
) -> list[BatchShape]:
    """Shapes for steps of up to `max_tokens` nodes, ascending. Tile 1: plain decoding reads its KV in place."""
    sizes = sorted({b for b in (BUCKETS if buckets is None else buckets) if b <= max_tokens} | {_rounded(max_tokens)})
    if any(b > ITEM_TILE and b % ITEM_TILE for b in sizes):
        raise ValueError(f"token_buckets above {ITEM_TILE} must be multiples of it, got {sizes}")
    return [BatchShape(b, min(b, choices(max_requests)), min(b, max_requests), 1, segments) for b in sizes]


def choices(max_requests: int) -> int:
    """Most logits a step computes: one a request, and at least a tile's worth for prompt log-probabilities."""
    return max(max_requests, ITEM_TILE)


def _rounded(n: int) -> int:
    return n if n <= ITEM_TILE else -(-n // ITEM_TILE) * ITEM_TILE


def compile_all(
    jobs: Sequence[tuple[str, Callable[[], T]]], report: Callable[[str], None], threads: int = 2
) -> list[T]:
    """Run compile jobs in threads (XLA leaves the interpreter lock), reporting each one's name when it is done."""
    with ThreadPoolExecutor(threads) as pool:
        futures = {pool.submit(job): (i, name) for i, (name, job) in enumerate(jobs)}
        results: dict[int, T] = {}
        for future in as_completed(futures):
            i, name = futures[future]
            results[i] = future.result()
            report(name)
    return [results[i] for i in range(len(jobs))]
