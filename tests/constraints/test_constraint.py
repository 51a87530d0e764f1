"""Masks and pruned candidates of a constraint, against a grammar whose texts are listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.constraints.constraint import Constraint
from jaxspec.sched.spec.trees.candidates import Candidates

VOCAB, END = 40, 39


class Listed:
    """A grammar of the given texts, each followed by the end token."""

    def __init__(self, texts: list[tuple[int, ...]]) -> None:
        self.texts, self.read = [(*t, END) for t in texts], ()

    def next(self) -> set[int]:
        at = len(self.read)
        return {t[at] for t in self.texts if len(t) > at and t[:at] == self.read}

    def consume(self, token: int) -> bool:
        if token not in self.next():
            return False
        self.read = (*self.read, token)
        return True

    def forced(self) -> list[int]:
        return [*self.next()] if len(self.next()) == 1 else []

    def rollback(self, tokens: int) -> None:
        self.read = self.read[: len(self.read) - tokens]

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token in self.next() or {END}:
            mask[token // 32] |= np.uint32(1 << token % 32)

    @property
    def finished(self) -> bool:
        return not self.next()


def allowed(mask: np.ndarray) -> set[int]:
    return {i for i in range(VOCAB) if mask[i // 32] >> np.uint32(i % 32) & 1}


TEXTS = [(1, 2, 3), (1, 2, 4), (1, 5), (6,)]


def test_masks_follow_the_tree() -> None:
    constraint = Constraint(VOCAB, Listed(TEXTS))
    constraint.append(1)
    # 1 ┬ 2 ┬ 3 ─ END
    #   │   └ 9 (forbidden) ─ 2
    #   └ 5
    masks = constraint.masks([1, 2, 3, END, 9, 2, 5], [0, 1, 2, 3, 2, 3, 1])
    assert [allowed(masks[i]) for i in (0, 1, 2, 3, 6)] == [{2, 5}, {3, 4}, {END}, {END}, {END}]
    assert allowed(constraint.masks()[0]) == {2, 5}  # the walk left the state as it was
    constraint.append(5)
    constraint.append(END)
    assert constraint.finished and constraint.failure is None


@given(data=st.data())
def test_pruning_leaves_what_the_masks_allow(data: Any) -> None:
    size = data.draw(st.integers(1, 20))
    parent = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
    token = [data.draw(st.sampled_from((1, 2, 3, 4, 5, 6, END))) for _ in range(size)]
    constraint = Constraint(VOCAB, Listed(TEXTS), min_tokens=data.draw(st.integers(0, 3)), stop_ids=[END])
    logprob = np.zeros(size, np.float32)
    found = constraint.prune(Candidates(np.asarray(token, np.int32), np.asarray(parent, np.int32), logprob))
    for i in range(size):
        path = [i]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        fresh, fits = Constraint(VOCAB, Listed(TEXTS), min_tokens=constraint._min_tokens, stop_ids=[END]), True
        for node in path:
            # If only the end token is left, it may come before min_tokens, but no draft of it is verified.
            early = token[node] == END and len(fresh._output) < constraint._min_tokens
            fits = fits and not fresh.finished and not early and token[node] in allowed(fresh.masks()[0])
            fresh.append(token[node])
        assert np.isfinite(found.logprob[i]) == fits


def test_the_end_comes_after_min_tokens() -> None:
    constraint = Constraint(VOCAB, min_tokens=2, stop_ids=[END, 7])
    masks = constraint.masks([0, 1, 2], [0, 1, 2])
    assert [{END, 7} & allowed(m) for m in masks] == [set(), set(), {END, 7}]
    constraint.append(3)
    assert allowed(constraint.masks([3, 1], [0, 1])[1]) == set(range(VOCAB))


def test_a_grammar_that_has_ended_ends_the_answer_before_min_tokens() -> None:
    constraint = Constraint(VOCAB, Listed([(6,)]), min_tokens=5, stop_ids=[END])
    constraint.append(6)
    assert allowed(constraint.masks()[0]) == {END}


def test_bad_words_are_forbidden_where_they_would_end() -> None:
    constraint = Constraint(VOCAB, bad_words=[(4,), (1, 2, 3)])
    assert 4 not in allowed(constraint.masks()[0])
    constraint.append(1)
    masks = constraint.masks([1, 2, 3], [0, 1, 2])
    assert [3 in allowed(m) for m in masks] == [True, False, True]


@pytest.mark.parametrize("grammar", [True, False])
def test_allowed_tokens(grammar: bool) -> None:
    mask = np.zeros(2, np.uint32)
    mask[0] = 1 << 2 | 1 << 6
    constraint = Constraint(VOCAB, Listed(TEXTS) if grammar else None, allowed=mask)
    assert allowed(constraint.masks()[0]) == ({6} if grammar else {2, 6})


def test_a_token_that_no_mask_kept_away_is_reported() -> None:
    constraint = Constraint(VOCAB, Listed(TEXTS))
    constraint.append(30)
    assert constraint.failure == "the grammar does not allow the token 30"


class TooMuch(Listed):
    """Takes too much work after the first token."""

    def consume(self, token: int) -> bool:
        if token == 1:
            raise RuntimeError("too much")
        return super().consume(token)


def test_a_grammar_that_takes_too_much_work_ends_the_answer() -> None:
    constraint = Constraint(VOCAB, TooMuch(TEXTS))
    constraint.append(1)
    assert constraint.failure == "too much"


def test_a_draft_that_takes_too_much_work_is_no_crash() -> None:
    constraint = Constraint(VOCAB, TooMuch(TEXTS))
    masks = constraint.masks([0, 1], [0, 1])
    assert len(masks) == 2 and constraint.failure == "too much"


def test_a_grammar_that_fails_while_it_drafts_fails_the_request_not_the_drafter() -> None:
    class Failing(Listed):
        def forced(self) -> list[int]:
            raise RuntimeError("it takes too much time")

    constraint = Constraint(VOCAB, Failing([(1, 2, 3)]), None, [], 0, ())
    constraint.append(1)
    assert constraint.forced(4) == [] and constraint.failure == "it takes too much time"
