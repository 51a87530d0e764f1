"""The choice of how far to draft and what to verify, on made-up times and drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.sched.plan import Lookahead
from jaxspec.sched.spec.calibration import BIN_EDGES, AcceptanceRecord, Calibration, chances, verified_nodes
from jaxspec.sched.spec.depth import DepthController, DraftTimes
from jaxspec.sched.spec.micro_batches import DrafterLoad, seconds
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.policy import StepCandidates
from jaxspec.sched.spec.trees.throughput import Throughput
from jaxspec.sched.timing import StepTimes

#: A plateau up to eight tokens, then a slope, as of a memory-bound device.
STEP = {1: 10.0, 2: 10.0, 4: 10.5, 8: 11.0, 16: 15.0, 32: 25.0, 64: 45.0}


def speculation(per_level: float = 0.5) -> DepthController:
    return DepthController(
        DraftTimes(StepTimes(STEP), lambda n, c, levels, w: 0.5 + per_level * levels), Lookahead(32, 8), [1, 4]
    )


def chain(n: int, probability: float = 0.5) -> Candidates:
    ahead = np.arange(n, dtype=np.int32)
    return Candidates(ahead, ahead - 1, ((ahead + 1) * np.log(probability)).astype(np.float32))


def select(
    spec: DepthController, candidates: list[Candidates], records: list[AcceptanceRecord], limits: list[int]
) -> list[np.ndarray]:
    forest = Forest(candidates)
    forest = forest.calibrated(chances(forest, [spec.calibration] * len(candidates), records))
    masks = Throughput(spec.times.step).select(StepCandidates(forest, limits, 10**6, 0, [], len(candidates)))
    for c, mask, limit in zip(forest, masks, limits, strict=True):
        if spec.probing and limit and not mask.any():  # as the speculator does
            mask[c.best(1)[0]] = True
    return masks


def play(spec: DepthController, rounds: int, hit: float, requests: int = 1, seed: int = 0) -> list[int]:
    """Levels drafted in each round, when each node of a chain is accepted with probability `hit`."""
    rng, levels = np.random.default_rng(seed), []
    records = [AcceptanceRecord() for _ in range(requests)]
    for _ in range(rounds):
        ahead = spec.decide(requests, requests, records)
        levels.append(ahead.levels)
        if not ahead.levels:
            continue
        candidates = [chain(ahead.levels) for _ in records]
        for c, mask, record in zip(
            candidates, select(spec, candidates, records, [ahead.drafts] * requests), records, strict=True
        ):
            accepted = 0
            while accepted < mask.sum() and rng.random() < hit:
                accepted += 1
            spec.observe(c, mask, range(accepted), record, spec.width)
    return levels


def test_drafts_that_are_never_accepted_stop_soon_and_are_rarely_retried() -> None:
    levels = play(speculation(), 1000, hit=0.0)
    assert sum(level > 0 for level in levels[50:]) < 12
    assert sum(level > 0 for level in levels[500:]) <= 2


def test_good_drafts_are_drafted_deep_and_better_ones_deeper() -> None:
    deep = [np.mean(play(speculation(), 300, hit)[100:]) for hit in (0.3, 0.6, 0.9)]
    assert deep[0] < deep[1] < deep[2] and deep[2] > 5


def test_a_costly_drafter_is_used_less() -> None:
    assert np.mean(play(speculation(0.2), 300, 0.5)[100:]) > np.mean(play(speculation(3.0), 300, 0.5)[100:])


def test_many_requests_leave_no_room_for_drafts() -> None:
    assert np.mean(play(speculation(), 200, 0.5, requests=1)[50:]) > 1
    assert np.mean(np.asarray(play(speculation(), 200, 0.5, requests=32)[50:]) > 0) < 0.2


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    spec = speculation()
    play(spec, 200, hit=0.0)
    assert np.mean(np.asarray(play(spec, 4000, hit=0.95)[-100:]) > 0) > 0.9


@given(data=st.data())
def test_selection_is_closed_and_within_limits(data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spec = speculation()
    forest, limits = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        n = int(rng.integers(1, 20))
        parent = np.asarray([int(rng.integers(-1, i)) if i else -1 for i in range(n)], np.int32)
        logprob = np.zeros(n, np.float32)
        for i in range(n):
            logprob[i] = (logprob[parent[i]] if parent[i] >= 0 else 0) + np.log(rng.uniform(0.01, 1))
        logprob[rng.random(n) < 0.1] = -np.inf
        forest.append(Candidates(np.arange(n, dtype=np.int32), parent, logprob))
        limits.append(int(rng.integers(0, 12)))
    masks = select(spec, forest, [AcceptanceRecord() for _ in forest], limits)
    for c, mask, limit in zip(forest, masks, limits, strict=True):
        assert mask.sum() <= limit
        assert np.isfinite(c.logprob[mask]).all()
        assert all(c.parent[i] < 0 or mask[c.parent[i]] for i in np.flatnonzero(mask))


def test_calibration_learns_what_probabilities_are_worth() -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    for _ in range(5000):
        said = rng.uniform()
        calibration.observe(np.log(said), rng.random() < said / 2, 1)  # twice too sure
    middles = [0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.935, 0.985]
    assert calibration.rates()[6:] == pytest.approx(np.asarray(middles) / 2, abs=0.12)
    assert calibration.rates()[0] < 0.05


def test_calibration_distinguishes_levels() -> None:
    """A drafter that is right about the first level and half as good as it says at the third."""
    calibration, rng = Calibration(), np.random.default_rng(0)
    for _ in range(6000):
        level = int(rng.integers(1, 4))
        calibration.observe(np.log(0.75), rng.random() < (0.75 if level < 3 else 0.375), level)
    rate = calibration.rates()[10]
    found = [min(1.0, rate * calibration.of_level(level)) for level in (1, 2, 3)]
    assert found == pytest.approx([0.75, 0.75, 0.375], abs=0.06)
    assert calibration.of_level(4) == 1.0


def test_chances_are_multiplied_along_paths_each_drafters_own() -> None:
    """Against the same said slowly; one place is empty."""
    rng, kinds, records = (
        np.random.default_rng(3),
        [speculation(), speculation()],
        [AcceptanceRecord(), AcceptanceRecord(), AcceptanceRecord()],
    )
    for spec in kinds:
        for _ in range(300):
            spec.calibration.observe(np.log(rng.uniform()), rng.random() < rng.uniform(), int(rng.integers(1, 4)))
    records[0].observe(2.0, 5)
    records[1].observe(9.0, 1)
    parent = np.asarray([-1, -1, 0, 1, 2, 2, 3], np.int32)
    said = np.asarray([-0.1, -2.5, -0.4, -2.6, -0.5, -3.0, -np.inf], np.float32)
    trees = [Candidates(np.arange(n, dtype=np.int32), parent[:n], said[:n]) for n in (7, 0, 5)]
    own = [kinds[0], kinds[0], kinds[1]]
    found = chances(Forest(trees), [spec.calibration for spec in own], records)
    expected: list[float] = []
    for tree, spec, record in zip(trees, own, records, strict=True):
        depth, chance = {-1: 0}, {-1: 1.0}
        for i, above in enumerate(tree.parent.tolist()):
            depth[i] = depth[above] + 1
            ratio = tree.logprob[i] - (tree.logprob[above] if above >= 0 else 0)
            rate = spec.calibration.rates()[np.searchsorted(np.log(BIN_EDGES), ratio)]
            factor = spec.calibration.of_level(depth[i]) * (record.factor if above < 0 else 1.0)
            chance[i] = chance[above] * min(1.0, rate * factor) * np.isfinite(ratio)
            expected.append(chance[i])
    assert found == pytest.approx(expected)
    assert found[6] == 0 and (found[:6] > 0).all()
    for tree, spec in zip(trees, own, strict=True):
        average = chances(Forest([tree]), [spec.calibration], [AcceptanceRecord()])
        assert spec.expected_of(tree, AcceptanceRecord()) == pytest.approx(average.sum())


@pytest.mark.parametrize("own", [0.15, 0.45])
def test_a_requests_chances_become_its_own(own: float) -> None:
    """Whether its drafts do worse or better than those of the others, of which 0.3 are accepted."""
    spec, rng, tree = speculation(), np.random.default_rng(0), chain(1, 0.35)
    spec.width = 1
    for _ in range(3000):
        spec.observe(tree, np.ones(1, bool), [0] if rng.random() < 0.3 else [], AcceptanceRecord(), spec.width)
    record, found = AcceptanceRecord(), []
    for _ in range(600):
        average = spec.calibration.expected_accepted(verified_nodes(tree, [0]))
        record.observe(average, int(rng.random() < own))
        found.append(float(chances(Forest([tree]), [spec.calibration], [record])[0]))
    # A record returns a little to the average with each observation, here by 0.12 of about 0.42.
    expected = 0.3 * (own + 0.12) / (0.3 + 0.12)
    assert np.mean(found[100:]) == pytest.approx(expected, abs=0.02)


def test_a_request_whose_drafts_do_better_than_others_gets_credit_for_it() -> None:
    spec, lucky = speculation(), AcceptanceRecord()
    for _ in range(20):
        lucky.observe(1.0, 2)
    average, own = chances(Forest([chain(2, 0.35)] * 2), [spec.calibration] * 2, [AcceptanceRecord(), lucky]).reshape(
        2, 2
    )
    assert own == pytest.approx(average * lucky.factor)
    certain = chances(Forest([chain(1, 0.99)]), [spec.calibration], [lucky])
    assert certain.tolist() == [1.0]


def test_a_request_whose_drafts_fail_gets_fewer() -> None:
    spec, good, bad = speculation(), AcceptanceRecord(), AcceptanceRecord()
    for _ in range(20):
        good.observe(1.0, 2)
        bad.observe(1.0, 0)
    c = chain(6, 0.7)
    expected = chances(Forest([c, c]), [spec.calibration] * 2, [good, bad])
    assert expected[:6].sum() > 1.5 * expected[6:].sum()
    masks = select(spec, [c, c], [good, bad], [6, 6])
    assert masks[0].sum() > masks[1].sum()


def test_a_wider_beam_is_tried_and_kept_as_long_as_it_does_better() -> None:
    """What a chain has shown is no reason against a beam that was never drafted; what the beam has shown is."""
    times = DraftTimes(StepTimes({1: 10.0, 64: 10.5}), lambda n, c, levels, w: (0.5 + 0.1 * w) * levels)
    spec, record, rng = DepthController(times, Lookahead(32, 8), [1, 4]), AcceptanceRecord(), np.random.default_rng(0)
    for width, chosen in ((1, 4), (4, 1)):
        for _ in range(200):
            spec.width = width
            accepted = int(rng.geometric(0.4)) - 1
            spec.observe(chain(4, 0.6), np.ones(4, bool), range(min(accepted, 4)), record, spec.width)
        spec.decide(1, 1, [AcceptanceRecord()])
        assert spec.levels and spec.width == chosen


def test_drafting_that_overlaps_verification_costs_less_and_goes_deeper() -> None:
    """Sixteen requests: with a device of its own the drafter drafts half of them while the others are verified."""
    times, levels = StepTimes({n: 0.5 + 0.02 * n for n in range(1, 200)}), {}
    records = [AcceptanceRecord() for _ in range(16)]
    for own_device in (False, True):
        spec = DepthController(
            DraftTimes(times, lambda n, uncached, levels, w: 0.025 * n * levels, own_device), Lookahead(32, 8), [1]
        )
        for rate in spec._level_rates[1]:
            rate.prior = 0.95
        levels[own_device] = [spec.decide(16, 32, records).levels for _ in range(3)]
        (speed,) = list(spec._speeds(16, 32, 1, 1.0))[5:6]
        loads = [DrafterLoad(16, lambda n: 0.025 * n * 6, 6, own_device)]
        took = min(seconds(parts, loads, 0, times.of) for parts in (1, 2))
        expected = sum(0.95**level for level in range(7))
        assert speed == pytest.approx(16 * expected / took)
    assert levels == {False: [1, 1, 1], True: [6, 6, 6]}


def test_a_longer_context_makes_more_drafts_pay() -> None:
    """48 requests at the ridge: a draft token makes a step of 4 ms longer, but hardly one that reads 10 ms of KV."""
    times, levels, nodes = StepTimes({n: max(4.0, 0.03 * n) for n in range(1, 1025)}, 1e-3), [], []
    for context in (0.0, 50.0, 200.0):
        spec = DepthController(DraftTimes(times, lambda n, c, levels, w: 0.3 * levels), Lookahead(32, 8), [1])
        spec.context = context
        levels.append(spec.decide(120, 120, [AcceptanceRecord()]).levels)
        forest = Forest([chain(8, 0.6)] * 120)
        step = StepCandidates(forest, [8] * 120, 10**6, 0, [], 120, round(120 * context))
        nodes.append(sum(int(mask.sum()) for mask in Throughput(times).select(step)))
    assert levels == sorted(levels) and levels[0] == 0 < levels[-1]
    assert nodes == sorted(nodes) and nodes[0] < nodes[-1]
