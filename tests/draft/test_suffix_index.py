"""The suffix index, against searching all texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.draft.suffix_index import MAX_MATCH, NGRAMS, OCCURRENCES, SuffixIndex

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8)


def in_common(known: list[int], at: int, text: list[int]) -> int:
    """How many tokens before `at` are those at the end of `text`."""
    length = 0
    while length < min(at, len(text), MAX_MATCH) and known[at - 1 - length] == text[-1 - length]:
        length += 1
    return length


@settings(deadline=None, max_examples=200)
@given(texts=TEXTS, last=st.lists(st.integers(0, 2), min_size=1, max_size=12), slots=st.sampled_from([1, 4, 1024]))
def test_matches_are_those_of_a_search(texts: list[list[int]], last: list[int], slots: int) -> None:
    """Also where all n-grams share a slot of the table."""
    index, known = SuffixIndex(10_000, slots), list[int]()
    for text in texts:
        index.extend(text)
        index.end_text()
        known += [*text, -1]
    index.extend(last)
    known += last
    lengths = {at: in_common(known, at, last) for at in range(1, len(known)) if at < len(known)}
    searched = {at: n for at, n in lengths.items() if n >= NGRAMS[-1]}
    found = {match.position: match.length for match in index.matches(last, 1000)}
    assert found.items() <= searched.items()
    if slots > 4:  # no more occurrences than are looked at
        assert found == searched or len(searched) > OCCURRENCES
    ranked = index.matches(last, 3)
    assert ranked == sorted(ranked, key=lambda match: (-match.length, -match.position))


@settings(deadline=None, max_examples=100)
@given(capacity=st.integers(4, 40), tokens=st.lists(st.integers(0, 3), max_size=150))
def test_forgotten_tokens_are_not_used(capacity: int, tokens: list[int]) -> None:
    index = SuffixIndex(capacity, 64)
    index.extend(tokens)
    assert len(index) == len(tokens)
    oldest = max(0, len(tokens) - capacity)
    for position, length in index.matches(tokens[-20:], 50):
        assert oldest <= position - length
        assert tokens[position - length : position] == tokens[len(tokens) - length :]
        assert index.following(position, 3)[0] == tokens[position]


def test_a_continuation_ends_with_its_text_or_repeats() -> None:
    index = SuffixIndex(100, 64)
    index.extend([5, 6, 7, 8])
    index.end_text()
    assert [index.following(m.position, 8) for m in index.matches([5, 6], 4)] == [[7, 8]]
    index.extend([1, 2, 3, 1, 2])
    (match,) = index.matches([3, 1, 2], 4)
    assert index.following(match.position, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_n_grams_do_not_span_texts() -> None:
    index = SuffixIndex(100, 64)
    for text in ([1, 2], [3, 4]):
        index.extend(text)
        index.end_text()
    assert index.matches([2, 3], 4) == []


def test_long_texts() -> None:
    text = np.random.default_rng(0).integers(0, 50, 5000).tolist()
    index = SuffixIndex(4096, 1 << 12)
    index.extend([*text, *text[2000:2100]])
    best = index.matches(text[2036:2100], 4)[0]
    assert best.length == MAX_MATCH
    assert index.following(best.position, 5) == text[2100:2105]
