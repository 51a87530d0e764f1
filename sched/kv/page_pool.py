"""The KV page pool of the device: reference counts, prefix cache, allocation."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain, islice

#: Bytes of a key. 256 bits rule out collisions, also deliberate ones.
KEY_BYTES = 32


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, num_pages: int) -> None:
    """Append to `keys` until it covers the first `num_pages` pages of `tokens`; hashes only missing pages.

    A page's key is the digest of its parent's key and its own tokens, so it identifies the whole prefix.
    """
    for page in range(len(keys), num_pages):
        content = array("I", tokens[page * page_size : (page + 1) * page_size])
        parent = keys[-1] if keys else bytes(KEY_BYTES)
        keys.append(blake2b(parent + content.tobytes(), digest_size=KEY_BYTES).digest())


class PrefixIndex:
    """A one-to-one map between prefix keys and pages."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def find(self, key: bytes) -> int | None:
        """The page with this content, if there is one."""
        return self._page_of.get(key)

    def key(self, page: int) -> bytes:
        """The key of a page that is in the map."""
        return self._key_of[page]

    def keys(self) -> list[bytes]:
        """All keys."""
        return [*self._page_of]

    def insert(self, key: bytes, page: int) -> None:
        """Map `key` to `page`, unless another page already has this content."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Remove a page that is in the map."""
        del self._page_of[self._key_of.pop(page)]

    def check(self) -> None:
        """Raise `AssertionError` if the two directions of the map disagree."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of


class OutOfPages(Exception):
    """Too few pages are free; nothing was allocated."""


class PagePool:
    """Reference-counted pages 0 … num_pages - 1 of `page_size` tokens, with a prefix cache of full pages.

    A page is free, idle (no request holds it, but `match` still finds its content), or held by one or more requests.
    Only full pages are shared, and full pages are never written. `allocate` takes the lowest free pages; when none is
    free, it evicts idle pages, least recently used first. Raises `ValueError` for sizes below 1.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages of tokens, got num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.clear()

    def clear(self) -> None:
        """Free all pages, also those that requests hold, and empty the prefix cache."""
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_pages))  # a heap
        self._references = [0] * self.num_pages
        self._prefixes = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def usage(self) -> float:
        """Fraction of the pages that requests hold."""
        return self.num_used / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """`n` pages of undefined content with one reference each. Raises `OutOfPages` and then takes none."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages wanted, {self.num_free} free")
        return [self._fresh() for _ in range(n)]

    def _fresh(self) -> int:
        if self._free:
            page = heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._prefixes.forget(page)
        self._references[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. Raises `ValueError` for a page without references."""
        for page in reversed(pages):  # evict the end of a prefix first: fewer requests share it
            if self._references[page] < 1:
                raise ValueError(f"page {page} is not held")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._prefixes:
                self._idle[page] = None
            else:
                heappush(self._free, page)

    def match(self, tokens: Sequence[int], limit: int, keys: list[bytes] | None = None) -> list[int]:
        """The pages of the longest cached prefix of `tokens[:limit]`, whole pages only; adds a reference to each.

        `keys` are the prefix keys of the leading pages of `tokens` computed so far; extended in place.
        """
        pages: list[int] = []
        for page in self._cached(tokens, limit, [] if keys is None else keys):
            self._references[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def cached(self, tokens: Sequence[int], limit: int, keys: list[bytes] | None = None) -> int:
        """Tokens that `match` would find now. Takes no reference and may be called from any thread."""
        return self.page_size * sum(1 for _ in self._cached(tokens, limit, [] if keys is None else keys))

    def _cached(self, tokens: Sequence[int], limit: int, keys: list[bytes]) -> Iterator[int]:
        for i in range(limit // self.page_size if self.enable_prefix_caching else 0):
            extend_keys(keys, tokens, self.page_size, i + 1)
            page = self._prefixes.find(keys[i])
            if page is None:
                return
            yield page

    def recent_keys(self, most: int) -> list[bytes]:
        """Keys of at most `most` cached pages: of those that requests hold, then of the most recently used ones."""
        if len(self._prefixes) <= most:
            return self._prefixes.keys()
        held = (page for page, count in enumerate(self._references) if count and page in self._prefixes)
        return [self._prefixes.key(page) for page in islice(chain(held, reversed(self._idle)), most)]

    def register(
        self, tokens: Sequence[int], pages: Sequence[int], span: range, keys: list[bytes] | None = None
    ) -> None:
        """Add the pages of indices `span`, whose KV is committed, to the prefix cache as prefixes of `tokens`.

        A page whose content another page already has stays private. `keys` as in `match`.
        """
        if not self.enable_prefix_caching:
            return
        keys = [] if keys is None else keys
        extend_keys(keys, tokens, self.page_size, span.stop)
        for i in span:
            self._prefixes.insert(keys[i], pages[i])

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the pool agrees with `holders`, the page lists of all requests."""
        counted = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), "a page held twice by one request"
            for page in pages:
                counted[page] += 1
        assert counted == self._references, "references differ from what is held"
        free, idle = set(self._free), set(self._idle)
        held = {page for page, n in enumerate(counted) if n}
        assert len(free) == len(self._free), "a page free twice"
        assert len(free) + len(idle) + len(held) == self.num_pages == len(free | idle | held), "lost or in two states"
        assert all(page in self._prefixes for page in idle) and not any(page in self._prefixes for page in free)
        assert len(self._prefixes) <= len(idle) + len(held)
        self._prefixes.check()
