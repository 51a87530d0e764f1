"""Page pool in host memory, for swapped KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


class HostPagePool:
    """Pages 0 … num_pages - 1, each free, held by one request, or leaving (released, but may still be read).

    A released page can be allocated again only after `settle`, which starts a new plan: within a plan, uploads read
    host pages after offloads have written them.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"host_pages must not be negative, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # a heap
        self._held = [False] * num_pages
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - len(self._free) - len(self._leaving)

    @property
    def usage(self) -> float:
        """Fraction of the pages that requests hold; 0 without host pages."""
        return self.num_used / self.num_pages if self.num_pages else 0.0

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages of undefined content, the lowest free ones; None if fewer are free."""
        if n > len(self._free):
            return None
        pages = [heappop(self._free) for _ in range(n)]
        for page in pages:
            self._held[page] = True
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises `ValueError` for a page that is not held."""
        for page in pages:
            if not self._held[page]:
                raise ValueError(f"host page {page} is not held")
            self._held[page] = False
            self._leaving.append(page)

    def settle(self) -> None:
        """Free the released pages: later plans run after all their reads."""
        for page in self._leaving:
            heappush(self._free, page)
        self._leaving.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the pool agrees with `holders`, the page lists of all requests."""
        held = [page for pages in holders for page in pages]
        assert len(set(held)) == len(held), "a host page held twice"
        assert set(held) == {page for page, taken in enumerate(self._held) if taken}, (
            "held pages differ from those of the requests"
        )
        everywhere = sorted([*held, *self._free, *self._leaving])
        assert everywhere == list(range(self.num_pages)), "a host page lost or in two states"
