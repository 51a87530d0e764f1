"""The lattice of step shapes and their compilation ahead of time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from jaxspec.step.batch import BatchShape

T = TypeVar("T")

#: (stage, done, total)
Progress = Callable[[str, int, int], None]

#: Token counts a step may have. A finer ladder wastes fewer tokens, but each shape has to be compiled.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def lattice(
    max_tokens: int, max_requests: int, pages: int, buckets: Iterable[int] | None = None, children: int = 0,
    written: Callable[[int, int], int] | None = None,
) -> list[BatchShape]:  # fmt: skip
    """Shapes for steps of up to `max_tokens` nodes of requests of up to `pages` pages, ascending.

    `written`: pages written at most by (tokens, requests), where the pool is quantised.
    """
    sizes = sorted({b for b in (BUCKETS if buckets is None else buckets) if b <= max_tokens} | {max_tokens})
    return [
        BatchShape(b, min(b, choices(max_requests)), r, pages, children, written(b, r) if written else 0)
        for b in sizes
        for r in [min(b, max_requests)]
    ]


def choices(max_requests: int) -> int:
    """Most logits a step computes: one a request, and at least 64 for prompt log-probabilities and drafts."""
    return max(max_requests, 64)


def compile_all(jobs: Sequence[tuple[str, Callable[[], T]]], stage: str, progress: Progress) -> list[T]:
    """Run compile jobs (name, job) in threads (XLA leaves the interpreter lock), each reported when it is done."""
    progress(stage, 0, len(jobs))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(job): (i, name) for i, (name, job) in enumerate(jobs)}
        results: dict[int, T] = {}
        for future in as_completed(futures):
            i, name = futures[future]
            results[i] = future.result()
            progress(name, len(results), len(jobs))
    return [results[i] for i in range(len(jobs))]
