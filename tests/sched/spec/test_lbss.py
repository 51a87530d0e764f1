"""SPIN's bandit: its epochs, what it learns and loses, and what newcomers know from others."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from helpers.bandit import MOST, best_by_trying, play, request
from jaxspec.sched.spec.draft_choice.epsilon_greedy import EpsilonGreedy
from jaxspec.sched.spec.draft_choice.lbss import Lbss, LbssSettings
from jaxspec.sched.spec.draft_choice.matching import match
from jaxspec.sched.spec.draft_choice.prior import Prior

UNLIMITED = 2**63
#: Tokens a second of five requests on three drafters. All would have the first best, and it has room for two.
MEANS = np.array([[9, 3, 1], [8, 2, 1], [7, 6, 1], [7, 2, 5], [6, 4, 1]], float)
LIMITS = [2, 2, 1]


def lbss(limits: list[int], seed: int = 0, **settings: Any) -> Lbss:
    return Lbss(limits, np.random.default_rng(seed), LbssSettings.model_validate({"prior": False, **settings}))


def history(policy: Lbss, rates: np.ndarray, slots: int, cost: float = 0.0) -> np.ndarray:
    """Drafters `[slots, requests]` where request i always gets `rates[i, j]` tokens a second; no drafter: -1."""
    requests = [request(str(i)) for i in range(len(rates))]
    seen = []
    for _ in range(slots):
        drafters = policy.assign(requests, lambda _, __: cost)
        for i, j in enumerate(drafters):
            policy.observe(requests[i], j, 1 if j is None else int(rates[i, j]), 1.0)
        seen.append([-1 if j is None else j for j in drafters])
    return np.array(seen)


def stages(exploration: int, epochs: int) -> list[tuple[int, int, int]]:
    """(first slot, first slot of exploitation, first slot after it) of each epoch of those who start together."""
    found, at = [], 0
    for k in range(1, epochs + 1):
        found.append((at, at + exploration, at + exploration + 2**k))
        at = found[-1][2]
    return found


# --- epochs ---


def test_requests_that_start_together_share_the_papers_epochs():
    exploration, chunk, epochs = 6, 2, 6
    drafters = history(lbss(LIMITS, exploration=exploration, chunk=chunk), MEANS, stages(exploration, epochs)[-1][2])
    tried = np.zeros(MEANS.shape, bool)
    for first, exploits, end in stages(exploration, epochs):
        for start in range(first, exploits, chunk):
            assert (drafters[start : start + chunk] == drafters[start]).all()
        for row in drafters[first:exploits]:
            tried[np.arange(len(MEANS)), row] = True
        # Rates are always the same, so an estimate is the rate, or 0 for what was never tried.
        estimates = np.where(tried, MEANS, 0.0)
        assert (drafters[exploits:end] == drafters[exploits]).all()
        assert estimates[np.arange(5), drafters[exploits]].sum() == best_by_trying(estimates, LIMITS)[1]
        for row in drafters[exploits:end]:
            tried[np.arange(len(MEANS)), row] = True


def test_exploration_tries_all_drafters_equally_in_each_chunk():
    drafters = history(lbss([UNLIMITED] * 3, exploration=4000, chunk=2), MEANS, 4000)[::2]
    for request_drafters in drafters.T:
        assert np.bincount(request_drafters) / 2000 == pytest.approx(1 / 3, abs=0.04)
        assert (request_drafters[1:] == request_drafters[:-1]).mean() == pytest.approx(1 / 3, abs=0.04)


def test_a_chunk_that_does_not_fit_is_cut():
    drafters = history(lbss([UNLIMITED] * 50, exploration=5, chunk=2), np.ones((1, 50)), 5)[:, 0].tolist()
    assert drafters[1] == drafters[2] and drafters[3] == drafters[4]
    assert len(set(drafters)) == 3


def test_each_request_has_its_own_epochs():
    policy = lbss([UNLIMITED] * 2, exploration=4, chunk=4)
    rates = np.array([[9.0, 1.0], [1.0, 9.0]])
    a, b = request("a"), request("b")
    for _ in range(4):
        [j] = policy.assign([a], lambda *_: 0.0)
        assert j is not None
        policy.observe(a, j, int(rates[0, j]), 1.0)
    # a exploits what it has tried for two slots, while b explores for four.
    seen = []
    for _ in range(4):
        drafters = policy.assign([a, b], lambda *_: 0.0)
        for i, (r, j) in enumerate(zip((a, b), drafters, strict=True)):
            assert j is not None
            policy.observe(r, j, int(rates[i, j]), 1.0)
        seen.append(drafters[1])
    assert len(set(seen)) == 1


def test_explorers_have_room_before_those_who_exploit():
    policy = lbss([1, 1, 1], exploration=1, chunk=1, seed=3)
    a, b = request("a"), request("b")
    [j] = policy.assign([a], lambda *_: 0.0)
    policy.observe(a, j, 5, 1.0)
    assert policy.assign([a], lambda *_: 0.0) == [j]  # it exploits what it knows
    met = 0
    for n in range(20):
        newcomer = request(f"new {n}")
        at, theirs = policy.assign([a, newcomer], lambda *_: 0.0)
        assert None not in (at, theirs) and at != theirs
        met += theirs == j
        policy.ended(newcomer)
        assert policy.assign([a, b][:1], lambda *_: 0.0) == [j], "it returns when there is room"
    assert met


def test_a_place_that_comes_free_goes_to_who_exploits():
    policy, rates = lbss([1, 2], exploration=40, chunk=1), np.array([[9.0, 1.0], [8.0, 5.0]])
    assert history(policy, rates, 41)[-1].tolist() == [0, 1]
    a, b = request("0"), request("1")
    assert policy.assign([b], lambda *_: 0.0) == [0]
    assert policy.assign([a, b], lambda *_: 0.0) == [0, 1]
    policy.ended(a)
    assert policy.assign([b], lambda *_: 0.0) == [0]


def test_a_choice_stands_to_the_end_of_its_stage():
    policy, a, exploits = lbss([UNLIMITED] * 2, exploration=20, chunk=1), request("a"), stages(20, 5)[-1][1]
    drafters = []
    for t in range(exploits + 2**5):
        [j] = policy.assign([a], lambda *_: 0.0)
        assert j is not None
        drafters.append(j)
        # The first is the better one until it is relied on; then it gives nothing.
        policy.observe(a, j, (0 if t >= exploits else 6, 5)[j], 100.0 if t >= exploits else 1.0)
    assert set(drafters[exploits:]) == {0}


def test_the_next_drafter_is_known_ahead():
    policy, a = lbss([UNLIMITED] * 4, exploration=6, chunk=2, seed=5), request("a")
    rates, told, after, drafters = (3, 9, 5, 4), [], [], []
    for _ in range(200):
        [j] = policy.assign([a], lambda *_: 0.0)
        assert j is not None
        drafters.append(j)
        told.append(policy.ahead(a))
        policy.observe(a, j, rates[j], 1.0)
        after.append(policy.ahead(a))
    right = 0
    for first, exploits, end in stages(6, 5):
        for t in range(first, exploits):
            # The first slots of each chunk tell as well as the last ones.
            chunk_end = t + 2 - (t - first) % 2
            assert told[t] == (None if drafters[chunk_end] == drafters[t] else drafters[chunk_end])
            right += told[t] is not None
            if t + 1 == chunk_end:
                assert after[t] == told[t], "the same when the chunk is over"
        for t in range(end - 2, end):
            assert told[t] == (None if drafters[end] == drafters[t] else drafters[end])
        assert set(told[exploits : end - 2]) <= {None}, "it has the best already"
    assert right > 10
    policy.ended(a)
    assert policy.ahead(a) is None


# --- estimates and switching ---


def test_a_goodput_is_tokens_over_seconds():
    policy, a = lbss([UNLIMITED] * 2, exploration=40, chunk=1), request("a")
    rng = np.random.default_rng(0)
    for _ in range(40):
        [j] = policy.assign([a], lambda *_: 0.0)
        # The first drafter: 10 tokens, in a second or in 19, so one a second; slot by slot it would look like 5.
        policy.observe(a, j, *((10, 1.0 if rng.random() < 0.5 else 19.0) if j == 0 else (2, 1.0)))
    assert policy.assign([a], lambda *_: 0.0) == [1]


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.0])
def test_a_switch_must_pay_within_the_stage(weight: float):
    """From 10 tokens a second to 11, for a second: gains as much in 11 slots, so 16 are worth it and 8 are not."""
    decided: dict[int, set[bool]] = {}
    for seed in range(30):
        policy = lbss([UNLIMITED] * 2, seed=seed, exploration=6, chunk=2, switch_weight=weight)
        drafters = history(policy, np.array([[10.0, 11.0]]), stages(6, 7)[-1][2], cost=1.0)[:, 0]
        for k, (_, exploits, _) in enumerate(stages(6, 7), 1):
            if drafters[exploits - 1] == 0 and 1 in drafters[:exploits]:
                decided.setdefault(k, set()).add(bool(drafters[exploits] == 1))
    assert decided == {k: {2**k > 11 * weight} for k in range(1, 8)}


# --- what it loses ---


def logarithmic(lost: np.ndarray) -> bool:
    """Whether it grows by about as much with each doubling, not twice as much as with the one before: `lost` is what
    was lost at 1, 2, 4, 8, … times so many slots."""
    doublings = np.arange(len(lost))
    misfits = [np.polyfit(x, lost, 1, full=True)[1].item() for x in (doublings, 2.0**doublings)]
    growth = np.diff(lost)
    return bool(growth[-3:].mean() < 2 * growth[:3].mean() and misfits[0] < misfits[1])


@pytest.mark.slow
def test_what_is_lost_grows_like_the_logarithm_of_time():
    at = 2 ** np.arange(6, 14) - 1
    learning = dict(exploration=12, chunk=4)
    lost, last = zip(*(play(lbss(LIMITS, s, **learning), MEANS, LIMITS, at[-1] + 1, s) for s in range(8)), strict=True)
    assert logarithmic(np.mean(lost, 0)[at])
    best = match(MEANS, LIMITS)
    assert sum(drafters == best for drafters in last) >= 7

    greedy = [EpsilonGreedy(LIMITS, np.random.default_rng(s), 0.2) for s in range(2)]
    assert not logarithmic(np.mean([play(p, MEANS, LIMITS, at[-1] + 1, 0)[0] for p in greedy], 0)[at])
    chance = lbss(LIMITS, exploration=2**14, chunk=4)  # it never comes to exploit
    assert not logarithmic(play(chance, MEANS, LIMITS, at[-1] + 1, 0)[0][at])


# --- newcomers ---


def test_a_kind_of_requests_is_backed_by_the_mean_over_all():
    prior = Prior(2, backing=4)
    short, long = Prior.kind(40), Prior.kind(3000)
    assert prior.mean(short).tolist() == [[0, 0, 0]] * 2
    for _ in range(12):
        prior.observe(short, 0, (6, 1.0, 1))
        prior.observe(long, 0, (2, 1.0, 1))
        prior.observe(long, 1, (3, 2.0, 1))
    # 12 slots of its own, and 4 of the mean over all, which is 4 tokens.
    assert prior.mean(short)[0] == pytest.approx([(12 * 6 + 4 * 4) / 16, 1, 1], rel=0.01)
    assert prior.mean(short)[1] == pytest.approx([3, 2, 1]), "nothing of its own: as all"
    assert prior.mean(Prior.kind(5)) == pytest.approx(np.array([[4, 1, 1], [3, 2, 1]]), rel=0.01)


def test_what_was_seen_long_ago_hardly_counts():
    prior = Prior(1, backing=4)
    for tokens in (9, 1):
        for _ in range(2000):
            prior.observe(3, 0, (tokens, 1.0, 1))
    assert prior.mean(3)[0, 0] == pytest.approx(1 + 8 * np.exp(-2), abs=0.2)
    assert prior.informed


#: Short prompts do best with the first drafter, long ones with the last.
KINDS = {40: (8.0, 4.0, 2.0), 3000: (3.0, 4.0, 7.0)}


def lost_by_newcomers(seed: int, prior: bool, life: int = 24, alive_at_once: int = 8, slots: int = 400) -> float:
    """Tokens a slot that requests get less than with their best drafter; a request that ends is replaced."""
    rng = np.random.default_rng(seed)
    policy = lbss([UNLIMITED] * 3, seed, prior=prior)
    alive, left, lost = [], [], []
    for t in range(slots):
        while len(alive) < alive_at_once:
            alive.append(request(f"{t} {len(alive)}", int(rng.choice(list(KINDS)))))
            left.append(int(rng.integers(1, 2 * life)))
        for i, (r, j) in enumerate(zip(alive, policy.assign(alive, lambda *_: 0.2), strict=True)):
            assert j is not None
            rates = KINDS[r.prompt_len]
            policy.observe(r, j, int(rng.binomial(MOST, rates[j] / MOST)), 1.0)
            lost.append(max(rates) - rates[j])
            left[i] -= 1
            if not left[i]:
                policy.ended(r)
        alive = [r for r, n in zip(alive, left, strict=True) if n]
        left = [n for n in left if n]
    return fmean(lost)


def test_newcomers_lose_less_by_what_similar_ones_have_learned():
    without, with_prior = ([lost_by_newcomers(seed, prior) for seed in range(6)] for prior in (False, True))
    assert fmean(with_prior) < 0.75 * fmean(without)


def informed(limits: list[int], rates: tuple[float, ...], **settings: Any) -> Lbss:
    """One that 40 requests with prompts of 40 tokens have taught."""
    policy = lbss(limits, prior=True, **settings)
    history(policy, np.array([rates] * 40), 6)
    for i in range(40):
        policy.ended(request(str(i)))
    return policy


def test_who_comes_when_enough_is_known_exploits_at_once():
    policy = informed([UNLIMITED] * 3, (3.0, 8.0, 5.0))
    assert policy.assign([request("new", 40), request("of another kind", 3000)], lambda *_: 0.0) == [1, 1]
    # The limits hold for them too.
    policy = informed([20, 20, 20], (3.0, 8.0, 5.0))
    drafters = policy.assign([request(f"new {i}", 40) for i in range(40)], lambda *_: 0.0)
    assert Counter(drafters) == {1: 20, 2: 20}


def test_who_comes_while_little_is_known_of_one_drafter_explores():
    policy = informed([UNLIMITED, UNLIMITED, 1], (3.0, 8.0, 5.0))
    drafters = policy.assign([request(f"new {i}", 40) for i in range(20)], lambda *_: 0.0)
    assert {0, 1} < set(drafters)


def test_a_request_unlike_the_others_finds_its_own_best():
    policy = informed([UNLIMITED] * 3, (8.0, 2.0, 2.0), prior_slots=4, prior_epoch=2)
    drafters = history(policy, np.array([[2.0, 2.0, 8.0]]), 300)[:, 0]
    assert drafters[0] == 0 and (drafters[200:] == 2).mean() > 0.9


def test_on_one_device_requests_share_a_drafter_unless_another_is_worth_its_round():
    rates = np.array([[5.0, 3.0], [5.0, 3.0], [3.0, 5.0]])

    def settled(rounds: list[float], verify: tuple[float, float] = (0.0, 0.0)) -> list[int]:
        policy = lbss([UNLIMITED] * 2, exploration=20, chunk=1)
        policy.share(1.0, rounds, verify)
        return history(policy, rates, 22)[-1].tolist()

    assert settled([0.1, 0.1]) == [0, 0, 1]
    assert settled([0.5, 0.5]) == [0, 0, 0]
    # The first one's drafts take so long to verify that the second one's fewer tokens come faster, or plain steps do.
    assert settled([0.1, 0.1], (1.5, 0.0)) == [1, 1, 1]
    assert settled([0.1, 0.1], (9.0, 9.0)) == [-1, -1, -1]
