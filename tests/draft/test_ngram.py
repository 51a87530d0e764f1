"""The n-gram drafter, against searching the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.draft.ngram import NGramIndex


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
        assert index.propose(count) == search(text, longest, shortest, count)


def test_the_longest_match_wins_over_the_latest():
    index = NGramIndex(longest=3, shortest=2)
    index.extend([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert index.propose(2) == [7, 9]


def test_the_latest_of_equal_matches_wins():
    index = NGramIndex(longest=2, shortest=2)
    index.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert index.propose(1) == [8]


def test_repeating_text_is_continued():
    index = NGramIndex()
    index.extend([5, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_nothing_matches():
    index = NGramIndex()
    assert index.propose(4) == []
    index.extend([1, 2, 3, 4, 3])
    assert index.propose(4) == []  # 3 came before, but no pair did


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (2, 0), (0, 0)])
def test_lengths_must_make_sense(longest: int, shortest: int):
    with pytest.raises(ValueError, match="expected 1 <= shortest <= longest"):
        NGramIndex(longest, shortest)
