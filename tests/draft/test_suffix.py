"""The suffix drafter: its trees, and whose answers they are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, tokens_of
from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.draft.suffix_index import MAX_MATCH
from jaxspec.draft.suffix_memory import SuffixMemory
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.calibration import BIN_EDGES
from jaxspec.sched.spec.trees.candidates import Candidates

SIZES: dict[str, Any] = dict(
    page_size=16, max_num_seqs=4, token_buckets=[1, 32], compilation_cache_dir="", kv_cache_tokens=2048,
    max_num_batched_tokens=32, max_model_len=128,
)  # fmt: skip


def request(tokens: list[int], prompt: int | None = None, tenant: str = "") -> Request:
    return Request("r", prompt or len(tokens), tokens, 500, 0.0, tenant=tenant, computed=len(tokens) - 1)


def proposal(drafter: SuffixDrafter, wanted: Request, levels: int = 8, width: int = 2) -> Candidates:
    scheduled = [ScheduledRequest(wanted, len(wanted.tokens) - 1, 1, 32, levels)]
    (candidates,) = drafter.propose(scheduled, lambda _: None, levels, width)()
    if candidates is None:
        return Candidates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
    return candidates


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=30), max_size=5),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    levels=st.integers(1, 8),
    width=st.sampled_from([1, 2]),
)
def test_it_proposes_a_tree(texts: list[list[int]], text: list[int], levels: int, width: int) -> None:
    drafter = SuffixDrafter("suffix", SuffixMemory(1000))
    for other in texts:
        drafter.ended(request([9, *other], prompt=1))
    c = proposal(drafter, request(text), levels, width)
    assert len(c) <= levels * width
    assert max(c.depths(), default=0) <= levels
    assert all(p < i for i, p in enumerate(c.parent.tolist()))
    assert len({(p, t) for p, t in zip(c.parent.tolist(), c.token.tolist(), strict=True)}) == len(c)
    if width == 1:
        assert c.parent.tolist() == list(range(-1, len(c) - 1))
    chance = np.exp(c.logprob)
    for node in range(-1, len(c)):  # children together are at most as likely as their parent
        assert chance[c.parent == node].sum() <= (1.0 if node < 0 else chance[node]) + 1e-5


def test_frequent_continuations_come_first() -> None:
    drafter = SuffixDrafter("suffix", SuffixMemory(1000))
    for end in (7, 8, 8):
        drafter.ended(request([0, 1, 2, 3, 4, 5, 6, end, 0, 0], prompt=1))
    c = proposal(drafter, request([9, 4, 5, 6]), levels=1)
    assert c.token.tolist() == [8, 7]
    assert c.logprob[0] - c.logprob[1] == pytest.approx(np.log(2), rel=1e-5)


def test_tenants_do_not_share_answers() -> None:
    drafter, answer = SuffixDrafter("suffix", SuffixMemory(1000)), [0, *range(1, 20)]
    drafter.ended(request(answer, prompt=1, tenant="a"))
    assert proposal(drafter, request([5, 6, 7], tenant="a"), levels=3, width=1).token.tolist() == [8, 9, 10]
    for other in ("b", ""):
        assert len(proposal(drafter, request([5, 6, 7], tenant=other))) == 0


def test_prompts_short_answers_and_old_tenants_are_not_remembered() -> None:
    drafter = SuffixDrafter("suffix", SuffixMemory(1000))
    drafter.ended(request(list(range(30)), prompt=25, tenant="a"))
    assert len(proposal(drafter, request([5, 6, 7], tenant="a"))) == 0
    assert len(proposal(drafter, request([26, 27], tenant="a"))) == 0
    for tenant in range(17):
        drafter.ended(request(list(range(30)), prompt=1, tenant=str(tenant)))
    assert len(proposal(drafter, request([5, 6, 7], tenant="0"))) == 0
    assert len(proposal(drafter, request([5, 6, 7], tenant="1"))) > 0


def test_shared_answers_are_everyones() -> None:
    drafter = SuffixDrafter("suffix", SuffixMemory(1000, shared=True))
    drafter.ended(request([0, *range(1, 20)], prompt=1, tenant="a"))
    assert proposal(drafter, request([5, 6, 7], tenant="b"), levels=3, width=1).token.tolist() == [8, 9, 10]


def test_nothing_is_remembered_if_that_is_off() -> None:
    drafter = SuffixDrafter("ngram")
    drafter.ended(request(list(range(30)), prompt=1))
    assert len(proposal(drafter, request([5, 6, 7]))) == 0
    assert proposal(drafter, request([1, 2, 3, 1, 2]), levels=2, width=1).token.tolist() == [3, 1]


def stated(text: list[int], levels: int = 8) -> np.ndarray:
    """The probability that n-gram lookup states of each token of its chain, given the one before it, `[levels]`."""
    return np.exp(np.diff(proposal(SuffixDrafter("ngram"), request(text), levels, 1).logprob, prepend=0))


def matching(length: int) -> list[int]:
    """A text whose last `length` tokens occurred before, and not the one in front of them."""
    own = list(range(length))
    return [1000, *own, 1001, 1002, *own]


def test_longer_matches_are_trusted_more_each_in_a_bin_of_its_own() -> None:
    """Calibration then learns how often matches of 2, of 3, of 4 and of many tokens are right."""
    first = [stated(matching(n))[0] for n in range(2, 2 * MAX_MATCH)]
    assert (np.diff(first) >= 0).all() and first[0] > 0.5 and first[-1] < 1
    bins = np.searchsorted(BIN_EDGES, [first[n - 2] for n in (2, 3, 4, 8, 16, MAX_MATCH)])
    assert (np.diff(bins) > 0).all()
    assert np.abs(np.subtract.outer(first, BIN_EDGES)).min() > 1e-4, "rounding must not move one to another bin"


def test_a_right_token_makes_the_match_of_the_next_one_longer() -> None:
    assert stated(matching(2))[1:4] == pytest.approx([stated(matching(n))[0] for n in (3, 4, 5)], rel=1e-5)


def test_what_is_less_likely_than_wanted_is_not_proposed() -> None:
    """Wanted are tokens with a probability of 0.7, which in the text itself takes a match of 4 tokens."""
    drafter = SuffixDrafter("suffix", SuffixMemory(1000))
    for length in range(1, 8):
        wanted = request(matching(length))
        (found,) = drafter.propose([ScheduledRequest(wanted, 1, 1, 32, 4)], lambda _: None, 4, 1, 0.7)()
        drafter.ended(request([0], prompt=1))
        assert (found is not None) == (length >= 4)


@pytest.mark.parametrize("tree", ["auto", "fixed", "global_greedy"])
def test_answers_known_or_not_are_those_of_plain_decoding(tree: str) -> None:
    texts = [list(range(i, i + 20)) for i in range(3)]
    expected = [tiny.greedy(text, 12) for text in texts]
    with tiny.llm(**SIZES, draft="suffix", tree=tree) as llm:
        for _ in range(3):
            assert [tokens_of(o) for o in llm.generate(texts, GREEDY)] == expected
        check_clean(llm)
        if tree == "fixed":  # the second and third time all is known
            assert llm.engine.stats().accepted_tokens > 20
