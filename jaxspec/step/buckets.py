"""Buckets: the shapes that steps are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxspec.step.batch import BatchShape


@dataclass(frozen=True)
class StepSizes:
    """The sizes that suit a backend. More sizes waste less padding but take longer to compile."""

    #: Default token counts of steps.
    tokens: tuple[int, ...]
    #: Logit rows of the largest step, unless it has more requests: they bound the drafts that all requests together can
    #: verify, and the rows of prompt log-probabilities.
    logit_rows: int
    #: Pages per request, besides the most that a request may have. The page table is sent to the device in every step.
    pages: tuple[int, ...] = ()
    #: Largest step, in tokens, that is compiled for each number of pages; larger ones are prompts, with other tables.
    paged_tokens: int = 0
    #: Whether draft rounds are compiled for two and four uncached tokens a request too. Decoding requests seldom have
    #: more, and on a CPU each token of padding takes as long as another.
    small_rounds: bool = False


#: The head is computed for all logit rows, padding included, which takes a CPU a noticeable part of a step.
CPU = StepSizes(
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048), 64, small_rounds=True
)
#: Matrix products have tiles of 16 rows at least, and a step is bound by memory up to about 256 tokens. 64 pages keep
#: the input of a step of 64 requests below 64 KiB.
GPU = StepSizes((16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), 512, (64, 512), 512)

#: Largest medium bucket in `needed_first`, tokens.
_MIDDLE = 64


def step_buckets(
    max_tokens: int, max_requests: int, pages: int, buckets: Iterable[int] | None = None, children: int = 0,
    written: Callable[[int, int], int] | None = None, sizes: StepSizes = CPU,
) -> list[BatchShape]:  # fmt: skip
    """Shapes for steps of up to `max_tokens` nodes, and requests of up to `pages` pages. Ascending by tokens and pages.

    `buckets`: token counts instead of those of `sizes`; `written`: for a quantised KV cache, (tokens, requests) ->
    maximum number of pages written.
    """
    tokens = sorted({b for b in (sizes.tokens if buckets is None else buckets) if b <= max_tokens} | {max_tokens})
    rows = max(max_requests, sizes.logit_rows)
    return [
        BatchShape(b, min(b, rows), r, p, children, written(b, r) if written else 0)
        for b in tokens
        for r in [min(b, max_requests)]
        for p in [*(p for p in sizes.pages if p < pages and b <= sizes.paged_tokens), pages]
    ]


def needed_first(shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """The shapes to compile before serving starts, out of ascending `shapes`.

    The largest holds every step, the smallest decodes one request, a medium one holds a short prompt or a few requests.
    """
    fewest = [s for i, s in enumerate(shapes) if i == 0 or shapes[i - 1].tokens < s.tokens]
    between = [s for s in fewest if _MIDDLE / 2 < s.tokens <= _MIDDLE]
    return [s for s in shapes if s in (shapes[0], *between[-1:], shapes[-1])]
