"""The distribution of output lengths: against a straightforward Kaplan-Meier, and what its quantiles cover."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.sched import PagePool, PolicyConfig, Request, RequestResult, Scheduler, SchedulerConfig
from jaxspec.sched.length.distribution import _AGAIN, _MEMORY, LengthDistribution, RatioDistribution, _above


def request(predicted: float | None = 100.0, output: int = 0, max_tokens: int = 1000) -> Request:
    return Request("r", 2, [0] * (2 + output), max_tokens, 0.0, first_prediction=predicted)


def filled(seen: list[tuple[float, bool]]) -> RatioDistribution:
    """After enough observations that nothing is left of the prior."""
    found = RatioDistribution()
    for i in range(_MEMORY):
        found.observe(*seen[i % len(seen)])
    return found


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
def test_it_is_the_kaplan_meier_estimate(seen: list[tuple[int, bool]]) -> None:
    repeated = [seen[i % len(seen)] for i in range(_MEMORY)]
    found = filled([(float(r), ended) for r, ended in seen])
    survival, last = 1.0, max(r for r, _ in repeated)
    for ratio in range(1, 10):
        at_risk = sum(r >= ratio for r, _ in repeated)
        ends = sum(r == ratio and ended for r, ended in repeated)
        if at_risk:
            survival *= 1 - ends / at_risk
        if ratio < last:
            assert _above(found.curve, ratio) == pytest.approx(survival, abs=1e-9)
    assert _above(found.curve, last) == 0


def test_a_quantile_knows_what_has_been_generated() -> None:
    found = filled([(0.5, True), (1.0, True), (2.0, True), (4.0, True)])
    assert [found.quantile(q) for q in (0.2, 0.3, 0.5, 0.75, 0.9)] == [0.5, 1.0, 1.0, 2.0, 4.0]
    assert [found.quantile(0.5, above) for above in (0.5, 1.0, 3.9)] == [2.0, 2.0, 4.0]
    assert found.quantile(0.5, 4.0) is None


def test_answers_that_were_cut_count_as_longer() -> None:
    cut, whole = filled([(1.0, True), (1.0, False)] * 4 + [(3.0, True)]), filled([(1.0, True)] * 8 + [(3.0, True)])
    assert cut.quantile(0.5) == 3.0 and whole.quantile(0.5) == 1.0


def test_the_quantiles_of_a_request() -> None:
    lengths = LengthDistribution()
    assert 60 < lengths.quantile(request(), 0.5) < 150 < lengths.quantile(request(), 0.9) < 400
    assert lengths.quantile(request(max_tokens=120), 0.9) == 120
    assert lengths.quantile(request(output=90), 0.5) > 90
    assert lengths.quantile(request(output=900), 0.5) == 1000  # longer than all: twice as long, at most max_tokens
    assert lengths.quantile(request(None, 3), 0.9) > lengths.quantile(request(None, 3), 0.5) > 3


def test_predictions_while_generating_have_a_distribution_of_their_own() -> None:
    """Of what was left relative to what each of them said; that at arrival is not touched by them."""
    lengths = LengthDistribution()
    at_arrival = lengths.quantile(request(), 0.5)
    for _ in range(_AGAIN * _MEMORY):
        ended = request(output=100)
        ended.repredicted += [(20, 40.0), (60, 20.0)]  # each said half of what was left
        lengths.ended(ended, True)
    again = request(output=30)
    again.repredicted.append((30, 50.0))
    assert lengths.quantile(again, 0.5) == lengths.quantile(again, 0.9) == 130
    assert lengths.quantile(request(), 0.5) == 100 != at_arrival, "all of these were as long as predicted"
    assert lengths.quantile(again, 0.5, at_arrival=True) == 100
    again.tokens += [0] * 200
    assert lengths.quantile(again, 0.5) == 230 + 200, "longer than all since it was predicted"
    unknown = request(None, 30)
    unknown.repredicted.append((10, 50.0))
    assert lengths.quantile(unknown, 0.5) == 110


def test_of_many_later_predictions_a_few_count() -> None:
    lengths, ended = LengthDistribution(), request(output=400)
    ended.repredicted += [(n, 100.0) for n in range(0, 400, 4)]
    lengths.ended(ended, True)
    seen = [ratio for ratio, _ in lengths._repredicted._seen][-_AGAIN:]
    assert lengths._repredicted._new <= _AGAIN and seen[-1] < 1 < seen[-_AGAIN + 1]


@pytest.mark.parametrize("bias", [0.5, 1.0, 2.0])
def test_nine_outputs_of_ten_do_not_exceed_their_quantile(bias: float) -> None:
    """With a predictor that errs at random and in one direction, and with answers that are cut."""
    config = SchedulerConfig(8, 64, 4096, None, 8, PolicyConfig())
    scheduler, random, within = Scheduler(config, PagePool(2048, 16)), Random(3), list[bool]()
    for i in range(3000):
        true, cap = max(1, round(random.lognormvariate(4.5, 0.6))), random.choice([150, 2000])
        r = Request(str(i), 2, [1, 2], cap, 0.0, predicted_len=max(1.0, bias * true * random.lognormvariate(0, 0.5)))
        scheduler.add(r, 0.0)
        assert r.predicted_quantiles is not None
        _, high = r.predicted_quantiles
        if i > 1500 and high < cap:
            within.append(true <= high)
        r.tokens += [0] * min(true, cap)
        scheduler.lengths.ended(r, true < cap)
        r.tokens = r.tokens[:2]
        scheduler.cancel(r.id, 0.0)
    assert len(within) > 500
    assert np.mean(within) == pytest.approx(0.9, abs=0.03)


def test_the_scheduler_tells_how_requests_ended() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 16, 64, None, 4, PolicyConfig(predictor="oracle")), PagePool(16, 16))
    seen = list[tuple[float, bool]]()
    scheduler.lengths._predicted.observe = lambda ratio, ended: seen.append((ratio, ended))  # type: ignore[method-assign]
    for name in "abc":
        scheduler.add(Request(name, 1, [1], 8, 0.0, true_len=4), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.update(plan, [RequestResult((5,), reason) for reason in ("stop", "length", None)], 1.0)
    scheduler.cancel("c", 1.0)
    assert seen == [(0.25, True), (0.25, False), (0.25, False)]
