"""Prefix keys as routers and replicas exchange them: 64 bits of the keys of the page pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxspec.sched.kv.page_pool import extend_keys

#: Leading pages of a prompt that a router looks at. What prompts share is mostly at their beginning, and a decision
#: costs time in proportion to these.
MOST_PAGES = 256
_BYTES = 8


def short_key(key: bytes) -> int:
    """The first 64 bits of a page's key. Two of a million pages share them with probability 3e-8, and then a request
    goes to a replica where it finds less than expected, no worse."""
    return int.from_bytes(key[:_BYTES], "big")


def short_keys(keys: Iterable[bytes]) -> tuple[int, ...]:
    """`short_key` of each."""
    return tuple(map(short_key, keys))


def prefix_keys(tokens: Sequence[int], page_size: int, most: int = MOST_PAGES) -> tuple[int, ...]:
    """Prefix keys of the leading full pages of a prompt, at most `most`; the same as those of a replica's page pool
    with this `page_size`. A page that holds the last token does not count: that one is always computed."""
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size, min(most, max(0, len(tokens) - 1) // page_size))
    return short_keys(keys)
