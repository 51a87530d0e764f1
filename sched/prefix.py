"""Which page holds which prefix: hash-chained keys of full pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

#: Bytes of a key. 256 bits: no two prefixes will ever share a key, not even prompts made to do so.
KEY_BYTES = 32


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, num_pages: int) -> None:
    """Append to `keys` until it covers the first `num_pages` pages of `tokens`; hashes only the pages it lacks.

    A page's key is the digest of its parent's key and its own tokens, so that it stands for the whole prefix.
    """
    for page in range(len(keys), num_pages):
        content = array("I", tokens[page * page_size : (page + 1) * page_size])
        parent = keys[-1] if keys else bytes(KEY_BYTES)
        keys.append(blake2b(parent + content.tobytes(), digest_size=KEY_BYTES).digest())


class PrefixIndex:
    """A one-to-one map between keys and the pages that hold their content."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def insert(self, key: bytes, page: int) -> None:
        """Make `page` findable under `key`, unless another page already is: then this one stays private."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def check(self) -> None:
        """Raise `AssertionError` if the two directions disagree."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
