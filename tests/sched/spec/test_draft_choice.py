"""Policies that choose a drafter for each request: what holds for all, the matching, and the baselines of SPIN."""

from __future__ import annotations

from collections import Counter
from itertools import product
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.bandit import best_by_trying, request
from helpers.fake_drafter import Fake
from jaxspec.sched import PolicyConfig, Request
from jaxspec.sched.slots import DRAFT_CHOICES, SlotContext
from jaxspec.sched.spec.draft_choice.choice import DraftChoice
from jaxspec.sched.spec.draft_choice.epsilon_greedy import EpsilonGreedy
from jaxspec.sched.spec.draft_choice.greedy import Greedy
from jaxspec.sched.spec.draft_choice.lbss import LbssSettings
from jaxspec.sched.spec.draft_choice.matching import match, match_shared
from jaxspec.sched.spec.draft_choice.single import Single

UNLIMITED = 2**63


def free(_: Request, __: int) -> float:
    return 0.0


def policy(name: str, limits: list[int], seed: int = 0, **lbss: float) -> DraftChoice:
    drafters = [Fake(f"{j}", 0, 1.0 + j, []) for j in range(len(limits))]
    by_name = {d.name: limit for d, limit in zip(drafters, limits, strict=True)}
    settings = {"draft_choice": name, "draft_limits": by_name, "policy_seed": seed, "lbss": lbss}
    return DRAFT_CHOICES.build(SlotContext(PolicyConfig.model_validate(settings), 1, drafters=drafters))


# --- the matching ---


@given(st.integers(0, 4), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_the_matching_is_the_best_of_all_within_the_limits(requests: int, limits: list[int], seed: int):
    # Small whole numbers, so that there are ties and negative gains.
    gains = np.random.default_rng(seed).integers(-5, 6, (requests, len(limits))).astype(float)
    matched = match(gains, limits)
    assert len(matched) == requests
    assert all(matched.count(j) <= b for j, b in enumerate(limits))
    taken = [gains[i, j] for i, j in enumerate(matched) if j is not None]
    assert (len(taken), sum(taken)) == best_by_trying(gains, limits)


def test_without_limits_every_request_gets_its_best_drafter():
    gains = np.random.default_rng(0).normal(size=(64, 3))
    assert match(gains, [UNLIMITED] * 3) == gains.argmax(1).tolist()


def test_matching_no_requests_or_no_drafters():
    assert match(np.zeros((0, 3)), [1, 1, 1]) == []
    assert match(np.zeros((2, 0)), []) == [None, None]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gains_that_are_no_numbers_are_refused(value: float):
    with pytest.raises(ValueError, match="finite"):
        match(np.array([[1.0, value]]), [1, 1])


@given(
    st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sets(st.integers(0, 2)),
    st.sampled_from([0.0, 0.2, 1.0]), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_on_one_device_the_best_of_all_assignments_by_what_a_step_takes(
    requests: int, limits: list[int], busy: set[int], scale: float, seed: int
):
    rng = np.random.default_rng(seed)
    drafters = len(limits)
    tokens, rounds = 1 + rng.exponential(1.0, (requests, drafters)), rng.exponential(0.5, drafters).tolist()
    verify = (scale * rng.exponential(1.0, drafters)).tolist()
    busy = {j for j in busy if j < drafters}

    def speed(drafted: tuple[int | None, ...]) -> float:
        used = busy | {j for j in drafted if j is not None}
        given_ = sum(1.0 if j is None else tokens[i, j] for i, j in enumerate(drafted))
        return given_ / (1.0 + sum(rounds[j] for j in used) + sum(verify[j] for j in drafted if j is not None))

    within = [
        each
        for each in product([None, *range(drafters)], repeat=requests)
        if all(each.count(j) <= b for j, b in enumerate(limits))
    ]
    found = match_shared(tokens, limits, 1.0, rounds, verify, busy)
    assert tuple(found) in within
    assert speed(tuple(found)) == pytest.approx(max(map(speed, within)))


def test_a_drafter_that_is_used_anyway_costs_the_others_nothing():
    tokens = np.array([[2.0, 2.5], [2.0, 1.0]])
    assert match_shared(tokens, [2, 2], 1.0, [0.0, 0.5], [0.0, 0.0], set()) == [0, 0]
    assert match_shared(tokens, [2, 2], 1.0, [0.0, 0.5], [0.0, 0.0], {1}) == [1, 0]


def test_a_drafter_whose_drafts_take_long_to_verify_is_left_for_one_with_few_drafts_or_for_none():
    tokens = np.array([[1.3, 2.0], [1.3, 2.0]])

    def matched(*verify: float) -> list[int | None]:
        return match_shared(tokens, [2, 2], 1.0, [0.0, 0.1], verify, set())

    assert matched(0.05, 0.1) == [1, 1]
    assert matched(0.05, 0.5) == [0, 0]
    assert matched(0.5, 0.8) == [None, None]


# --- all policies ---


@pytest.mark.parametrize("name", [name for name in DRAFT_CHOICES.names if DRAFT_CHOICES[name].assigns])
@given(
    limits=st.lists(st.sampled_from([1, 2, 3, UNLIMITED]), min_size=1, max_size=3),
    exploration=st.integers(1, 6),
    chunk=st.integers(1, 3),
    prior=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=25)
def test_limits_hold_in_every_slot_while_requests_come_go_and_sit_out(
    name: str, limits: list[int], exploration: int, chunk: int, prior: bool, seed: int
):
    rng = np.random.default_rng(seed)
    chunk = min(chunk, exploration)
    it = policy(name, limits, seed, exploration=exploration, chunk=chunk, prior=prior, prior_slots=2)
    alive: list[Request] = []
    for t in range(60):
        alive += [request(f"request {t} {i}", int(rng.integers(1, 200))) for i in range(int(rng.integers(3)))]
        asking = [r for r in alive if rng.random() < 0.8]
        drafters = it.assign(asking, lambda _, j: 0.1 * (j + 1))
        assert it.assign(asking, lambda _, j: 0.1 * (j + 1)) == drafters
        assert len(drafters) == len(asking)
        used = Counter(j for j in drafters if j is not None)
        assert all(0 <= j < len(limits) and n <= limits[j] for j, n in used.items())
        if name in ("lbss", "epsilon_greedy") and None in drafters:
            assert all(used[j] == b for j, b in enumerate(limits)), (
                "a request has no drafter, and a drafter is below its limit"
            )
        for r, j in zip(asking, drafters, strict=True):
            if rng.random() < 0.1:
                continue  # planned, and then left out
            it.observe(r, j, int(rng.integers(1, 6)), float(rng.uniform(0.5, 1.5)))
            ahead = it.ahead(r)
            assert ahead is None or (0 <= ahead < len(limits) and ahead != j)
        gone = [r for r in alive if rng.random() < 0.1]
        alive = [r for r in alive if r not in gone]
        for r in gone:
            it.ended(r)
    for r in alive:
        it.ended(r)
    remembered = [ref(r) for r in alive]
    alive, asking, gone, r = [], [], [], None
    assert not any(r() for r in remembered), "something is remembered of requests that ended"
    assert not any(getattr(it, name, None) for name in ("_placed", "_learners"))
    assert it.assign([], free) == []


def test_a_choice_must_be_registered():
    with pytest.raises(ValueError, match="draft_choice"):
        policy("best", [1])


def test_a_chunk_is_part_of_an_exploration():
    with pytest.raises(ValueError, match="longer than exploration"):
        LbssSettings(exploration=2, chunk=3)


# --- single ---


def test_every_request_gets_the_first_drafter():
    requests = [request(name) for name in "abc"]
    assert Single([UNLIMITED, 1]).assign(requests, free) == [0, 0, 0]
    assert Single([2, 8]).assign(requests, free) == [0, 0, None]


# --- greedy ---


def prompts(*lengths: int) -> list[Request]:
    return [request(f"{i}", n) for i, n in enumerate(lengths)]


def test_short_prompts_get_small_drafters_in_even_shares():
    lengths = (50, 10, 70, 30, 20, 60, 40)
    # The second drafter is the smallest, the first the largest.
    assert Greedy([UNLIMITED] * 3, [9.0, 1.0, 4.0]).assign(prompts(*lengths), free) == [2, 1, 0, 1, 1, 2, 2]


def test_the_smallest_is_filled_up_to_its_limit_then_the_next():
    assert Greedy([2, 1, 1], [1, 2, 3]).assign(prompts(5, 4, 3, 2, 1), free) == [None, 2, 1, 0, 0]
    # The first takes one only: even shares of what is left.
    assert Greedy([1, 9, 9], [1, 2, 3]).assign(prompts(1, 2, 3, 4, 5), free) == [0, 1, 1, 2, 2]


def test_a_drafter_is_kept_while_others_come_and_go():
    it = Greedy([UNLIMITED] * 2, [1, 2])
    a, b, c, d = prompts(10, 20, 5, 30)
    assert it.assign([a, b], free) == [0, 1]
    assert it.assign([a, b, c], free) == [0, 1, 0]  # shorter than both, so to the smaller one
    it.ended(a)
    assert it.assign([b, c, d], free) == [1, 0, 1]
    assert it.assign([b], free) == [1]


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None)
def test_no_drafter_gets_more_than_an_even_share_also_one_by_one(lengths: list[int], drafters: int, at_once: int):
    it = Greedy([UNLIMITED] * drafters, list(range(drafters)))
    requests = prompts(*lengths)
    it.assign(requests[:at_once], free)
    for n in range(at_once + 1, len(requests) + 1):
        it.assign(requests[:n], free)
    shares = Counter(it.assign(requests, free))
    assert None not in shares
    assert max(shares.values(), default=0) <= -(-len(requests) // drafters)


# --- ε-greedy ---


def test_it_explores_with_probability_epsilon_and_takes_the_best_otherwise():
    it = EpsilonGreedy([UNLIMITED] * 3, np.random.default_rng(0), 0.3)
    a, goodput = request("a"), (2, 5, 3)
    chosen: Counter[int | None] = Counter()
    for t in range(4000):
        [j] = it.assign([a], free)
        assert j is not None
        chosen[j] += t >= 100
        it.observe(a, j, goodput[j], 1.0)
    assert chosen[1] / 3900 == pytest.approx(0.7 + 0.1, abs=0.02)
    assert chosen[0] / 3900 == pytest.approx(0.1, abs=0.015)


def test_the_best_is_the_best_over_all_requests_by_tokens_over_seconds():
    it = EpsilonGreedy([1, 1], np.random.default_rng(0), 0.0)
    a, b = request("a"), request("b")
    it.observe(a, 0, 10, 1.0)  # a short slot at a high rate,
    it.observe(a, 0, 10, 19.0)  # a long one at a low rate: one token a second
    it.observe(b, 1, 2, 1.0)
    assert it.assign([b, a], free) == [1, 0], "the second takes what has room"
    assert it.ahead(a) == 1 and it.ahead(b) is None


def test_all_requests_explore_in_the_same_slots():
    """§VI-B2: "all inference requests use the best", or each a random one."""
    it = EpsilonGreedy([UNLIMITED] * 2, np.random.default_rng(1), 0.3)
    requests = [request(str(i)) for i in range(40)]
    it.observe(requests[0], 0, 9, 1.0)
    it.observe(requests[0], 1, 1, 1.0)
    others = []
    for _ in range(400):
        drafters = it.assign(requests, free)
        others.append(drafters.count(1))
        it.observe(requests[0], 0, 9, 1.0)
        for r in requests[1:]:
            it.observe(r, 1, 1, 1.0)
    assert others.count(0) == pytest.approx(0.7 * 400, abs=40)
    exploring = [n for n in others if n]
    assert np.mean(exploring) == pytest.approx(20, abs=1) and min(exploring) > 5


def test_a_request_that_comes_later_joins_the_slot():
    it = EpsilonGreedy([UNLIMITED] * 2, np.random.default_rng(0), 0.5)
    old, new = [request(f"a{i}") for i in range(20)], [request(f"b{i}") for i in range(20)]
    it.observe(old[0], 0, 1, 1.0)
    kinds = set()
    for _ in range(20):
        first, both = it.assign(old, free), it.assign([*new, *old], free)
        assert both[20:] == first and (1 in both[:20]) == (1 in first)
        kinds.add(1 in first)
        it.observe(old[0], first[0], 1, 1.0 + (first[0] or 0))
        assert it.assign([], free) == []
    assert kinds == {False, True}


def test_where_the_best_is_full_the_next_best_drafts():
    it = EpsilonGreedy([2, UNLIMITED, 1], np.random.default_rng(0), 0.0)
    requests = [request(str(i)) for i in range(5)]
    for j, tokens in enumerate((9, 1, 5)):
        it.observe(requests[0], j, tokens, 1.0)
    assert it.assign(requests, free) == [0, 0, 2, 1, 1]
