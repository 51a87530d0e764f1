"""The page pool: what it hands out, what it finds again, what it forgets first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jaxspec.sched.kv.page_pool import OutOfPages, PagePool

PAGE = 4


def cache(pool: PagePool, tokens: list[int]) -> list[int]:
    """Compute and release `tokens`; the pages that held them."""
    pages = pool.allocate(pool.pages_for(len(tokens)))
    pool.register(tokens, pages, range(len(tokens) // pool.page_size))
    pool.release(pages)
    return pages


def test_the_lowest_free_pages_come_first():
    pool = PagePool(6, PAGE)
    pages = pool.allocate(5)
    assert pages == [0, 1, 2, 3, 4]
    pool.release([3, 1])
    assert pool.allocate(3) == [1, 3, 5]
    assert (pool.num_free, pool.num_used, pool.usage) == (0, 6, 1.0)


def test_allocation_is_all_or_nothing():
    pool = PagePool(3, PAGE)
    held = pool.allocate(1)
    with pytest.raises(OutOfPages):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check([held])
    assert pool.allocate(0) == []


def test_a_page_is_released_once():
    pool = PagePool(2, PAGE)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_pool_has_pages_of_tokens(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="a pool needs pages of tokens"):
        PagePool(*sizes)


def test_released_pages_stay_findable_and_count_as_free():
    pool = PagePool(4, PAGE)
    tokens = list(range(10))
    first, second, _ = cache(pool, tokens)
    assert pool.num_free == 4
    assert pool.match(tokens, 10) == [first, second]  # the third is not full
    assert pool.num_free == 2
    pool.check([[first, second]])


def test_a_match_stops_at_the_limit_and_at_the_first_difference():
    pool = PagePool(4, PAGE)
    tokens = list(range(12))
    pages = cache(pool, tokens)
    assert pool.match(tokens, 11) == pages[:2]
    assert pool.match([*tokens[:4], 99, *tokens[5:]], 12) == pages[:1]
    assert pool.match([99, *tokens[1:]], 12) == []  # pages of equal content behind another beginning are others


def test_shared_pages_are_counted():
    pool = PagePool(2, PAGE)
    tokens = list(range(8))
    cache(pool, tokens)
    a, b = pool.match(tokens, 8), pool.match(tokens, 8)
    assert a == b
    pool.release(a)
    pool.check([b])
    assert pool.num_free == 0
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(b)
    assert pool.num_free == 2


def test_the_prefix_used_longest_ago_is_evicted_first_and_from_its_end():
    pool = PagePool(4, PAGE)
    old, new = [1] * 8, [2] * 8
    cache(pool, old)
    cache(pool, new)
    pool.release(pool.match(old, 8))  # now `new` is the older one
    held = pool.allocate(1)
    kept = pool.match(new, 8)
    assert len(kept) == 1
    assert len(pool.match(old, 8)) == 2
    assert set(held).isdisjoint(kept)


def test_unused_pages_are_taken_before_cached_ones():
    pool = PagePool(4, PAGE)
    tokens = [1] * 8
    cached = cache(pool, tokens)
    assert cached == [0, 1]
    assert pool.allocate(2) == [2, 3]
    assert pool.match(tokens, 8) == cached


def test_the_second_to_compute_a_prefix_keeps_its_page_to_itself():
    pool = PagePool(4, PAGE)
    tokens = list(range(8))
    a, b = pool.allocate(2), pool.allocate(2)
    pool.register(tokens, a, range(1))
    pool.register(tokens, b, range(2))  # its first page is known by now, its second is new
    pool.release(b)
    assert pool.match(tokens, 8) == [a[0], b[1]]
    pool.check([a, [a[0], b[1]]])


def test_keys_are_computed_once():
    pool = PagePool(4, PAGE)
    tokens = list(range(12))
    keys: list[bytes] = []
    pages = pool.allocate(3)
    pool.register(tokens, pages, range(2), keys)
    before = list(keys)
    assert len(before) == 2
    pool.register(tokens, pages, range(2, 3), keys)
    assert keys[:2] == before and len(keys) == len(set(keys)) == 3
    assert pool.match(tokens, 12, keys) == pages


def test_without_the_cache_nothing_is_found():
    pool = PagePool(2, PAGE, enable_prefix_caching=False)
    tokens = [1] * 8
    cache(pool, tokens)
    assert pool.match(tokens, 8) == []
    assert pool.allocate(2) == [0, 1]


class PoolMachine(RuleBasedStateMachine):
    """Holders come and go; `content` is what the pages really hold. Few tokens and pages, so that prefixes collide."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(5, 2)
        self.holders: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    @rule(target=held, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), full=st.integers(0, 4))
    def admit(self, tokens: list[int], full: int):
        """Match what is cached, allocate the rest and compute the first `full` pages."""
        pages = self.pool.match(tokens, len(tokens) - 1)
        for i, page in enumerate(pages):
            assert self.content[page] == tuple(tokens[: 2 * i + 2])
        free, missing = self.pool.num_free, self.pool.pages_for(len(tokens)) - len(pages)
        try:
            fresh = self.pool.allocate(missing)
        except OutOfPages:
            assert free < missing
            self.pool.release(pages)
            return multiple()
        assert not set(fresh) & {page for holder in self.holders for page in holder}
        matched, pages = len(pages), pages + fresh
        for page in fresh:
            self.content.pop(page, None)
        computed = range(matched, max(matched, min(full, len(tokens) // 2)))
        for i in computed:
            self.content[pages[i]] = tuple(tokens[: 2 * i + 2])
        self.pool.register(tokens, pages, computed)
        self.holders.append(pages)
        return pages

    @rule(pages=consumes(held))
    def release(self, pages: list[int]):
        self.holders = [holder for holder in self.holders if holder is not pages]
        self.pool.release(pages)

    @invariant()
    def books_balance(self):
        self.pool.check(self.holders)


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
