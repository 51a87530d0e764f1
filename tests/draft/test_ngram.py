"""The n-gram drafter, against searching the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.draft.ngram import MAX_MATCH, NgramDrafter, NGramIndex
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.calibration import BIN_EDGES


def search(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """What to propose, by trying every n and every place from the end."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


def proposed(index: NGramIndex, count: int) -> list[int]:
    """`count` tokens to follow the known ones, none if no n-gram matches."""
    found = index.match()
    return [] if found is None else index.copy(found[0], count)


def stated(text: list[int], levels: int = 8) -> np.ndarray:
    """The probability that the drafter states of each token, given the one before it, `[levels]`."""
    request = Request("r", len(text), text, 500, 0.0, computed=len(text) - 1)
    scheduled = [ScheduledRequest(request, len(text) - 1, 1, 32, levels)]
    (candidates,) = NgramDrafter().propose(scheduled, lambda _: None, levels, 1)()
    assert candidates is not None
    return np.exp(np.diff(candidates.logprob, prepend=0))


def matching(length: int) -> list[int]:
    """A text whose last `length` tokens occurred before, and not the one in front of them."""
    own = list(range(length))
    return [1000, *own, 1001, 1002, *own]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_it_proposes_what_a_search_finds(pieces: list[list[int]], a: int, b: int, count: int) -> None:
    longest, shortest = max(a, b), min(a, b)
    index, text = NGramIndex(longest, shortest), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        assert proposed(index, count) == search(text, longest, shortest, count)


def test_the_longest_match_wins_over_the_latest():
    index = NGramIndex(longest=3, shortest=2)
    index.extend([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert proposed(index, 2) == [7, 9]


def test_the_latest_of_equal_matches_wins():
    index = NGramIndex(longest=2, shortest=2)
    index.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert proposed(index, 1) == [8]


def test_repeating_text_is_continued():
    index = NGramIndex()
    index.extend([5, 1, 2, 3, 1, 2, 3, 1, 2])
    assert proposed(index, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_nothing_matches():
    index = NGramIndex()
    assert proposed(index, 4) == []
    index.extend([1, 2, 3, 4, 3])
    assert proposed(index, 4) == []  # 3 came before, but no pair did


def test_longer_matches_are_trusted_more_each_in_a_bin_of_its_own():
    """Calibration then learns how often matches of 2, of 3, of 4 and of many tokens are right."""
    first = [stated(matching(n))[0] for n in range(2, 2 * MAX_MATCH)]
    assert (np.diff(first) >= 0).all() and first[0] > 0.5 and first[-1] < 1
    bins = np.searchsorted(BIN_EDGES, [first[n - 2] for n in (2, 3, 4, 8, 16, MAX_MATCH)])
    assert (np.diff(bins) > 0).all()
    assert np.abs(np.subtract.outer(first, BIN_EDGES)).min() > 1e-4, "rounding must not move one to another bin"


def test_a_right_token_makes_the_match_of_the_next_one_longer():
    assert stated(matching(2))[1:4] == pytest.approx([stated(matching(n))[0] for n in (3, 4, 5)], rel=1e-5)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 1), max_size=100), st.integers(0, 3))
def test_a_match_is_as_long_as_what_both_places_share(text: list[int], repeats: int):
    index, text = NGramIndex(), text * (1 + repeats)
    index.extend(text)
    if (found := index.match()) is not None:
        start, length = found
        assert text[start - length : start] == text[len(text) - length :] and 2 <= length <= MAX_MATCH
        longer = length + 1
        if length < min(start, MAX_MATCH):
            assert text[start - longer : start] != text[len(text) - longer :]


def test_without_a_match_nothing_is_stated():
    assert stated([1, 2, 3]).size == 0


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (2, 0), (0, 0)])
def test_lengths_must_make_sense(longest: int, shortest: int):
    with pytest.raises(ValueError, match="expected 1 <= shortest <= longest"):
        NGramIndex(longest, shortest)
