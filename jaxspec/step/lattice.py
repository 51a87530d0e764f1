"""The lattice of step shapes and their compilation ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from jaxspec.step.batch import BatchShape

T = TypeVar("T")

#: Token counts a step may have. A finer ladder wastes fewer tokens, but each shape has to be compiled.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def lattice(max_tokens: int, max_requests: int, pages: int, buckets: Iterable[int] | None = None) -> list[BatchShape]:
    """Shapes for steps of up to `max_tokens` nodes of requests of up to `pages` pages, ascending."""
    sizes = sorted({b for b in (BUCKETS if buckets is None else buckets) if b <= max_tokens} | {max_tokens})
    return [BatchShape(b, min(b, choices(max_requests)), min(b, max_requests), pages) for b in sizes]


def choices(max_requests: int) -> int:
    """Most logits a step computes: one a request, and at least 64 for prompt log-probabilities and drafts."""
    return max(max_requests, 64)


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
