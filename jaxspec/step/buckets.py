"""Buckets: the shapes that steps are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxspec.step.batch import BatchShape

#: Default token counts of steps. More buckets waste less padding but take longer to compile.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
#: Largest medium bucket in `needed_first`, tokens.
_MIDDLE = 64


def step_buckets(
    max_tokens: int, max_requests: int, pages: int, buckets: Iterable[int] | None = None, children: int = 0,
    written: Callable[[int, int], int] | None = None,
) -> list[BatchShape]:  # fmt: skip
    """Shapes for steps of up to `max_tokens` nodes and requests of up to `pages` pages, ascending.

    `written`: for a quantised KV cache, (tokens, requests) -> maximum number of pages written.
    """
    sizes = sorted({b for b in (BUCKETS if buckets is None else buckets) if b <= max_tokens} | {max_tokens})
    return [
        BatchShape(b, min(b, max_logit_rows(max_requests)), r, pages, children, written(b, r) if written else 0)
        for b in sizes
        for r in [min(b, max_requests)]
    ]


def max_logit_rows(max_requests: int) -> int:
    """Maximum logit rows per step: one per request, at least 64 for prompt log-probabilities and drafts."""
    return max(max_requests, 64)


def needed_first(shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """The shapes to compile before serving starts, out of ascending `shapes`.

    The largest holds every step, the smallest decodes one request, a medium one holds a short prompt or a few requests.
    """
    between = [s for s in shapes if _MIDDLE / 2 < s.tokens <= _MIDDLE]
    return [s for s in shapes if s in (shapes[0], *between[-1:], shapes[-1])]
