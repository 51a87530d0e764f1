"""LAPS-SD's rules (§4 of its paper), one by one and through the scheduler, and its Figure 1."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pytest

from helpers.steps import Steps
from jaxspec.sched import PagePool, PolicyConfig, Request, RequestResult, RequestStatus, Scheduler, SchedulerConfig
from jaxspec.sched.order.acceptance_prior import AcceptancePrior
from jaxspec.sched.order.laps_sd import LapsSd, LapsSdSettings
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.timing import DraftedStepTimes


def order(**settings: Any) -> LapsSd:
    return LapsSd(LapsSdSettings(**settings))


def request(number: int = 0, length: float | None = 100) -> Request:
    return Request(f"r{number}", 1, [0], 300, 0.0, predicted_len=length, number=number)


def after_round(policy: LapsSd, r: Request, seconds: float = 0.1, proposed: int = 0, accepted: int = 0) -> None:
    """What the scheduler does after a round."""
    r.attained += seconds
    r.proposed += proposed
    r.accepted += accepted
    policy.observe(r, RequestResult((1,), None, proposed, accepted), seconds)


# -- queues ------------------------------------------------------------------------------------------------------------


def test_a_request_is_demoted_when_it_has_had_more_than_its_queue_holds():
    policy, r = order(queues=4, growth=2, first_threshold_ms=1000, window=99), request()
    queues = []
    for _ in range(20):
        after_round(policy, r, 0.5)
        queues.append(policy.queue(r))
    # S_up is 1, 2 and 4 s; at the threshold itself the request stays. The last queue has none.
    assert queues == [1] * 2 + [2] * 2 + [3] * 4 + [4] * 12


def test_one_long_round_may_lead_down_several_queues():
    policy, r = order(queues=5, growth=3, first_threshold_ms=100, window=99), request()
    after_round(policy, r, 1.0)
    assert policy.queue(r) == 4  # 0.1, 0.3, 0.9, 2.7


def test_prefill_is_no_round():
    run = Steps(order="laps_sd", tokens=4)
    r = run.add("a", 9, prompt=10)
    run.steps(3, 5.0)
    assert r.output_len == 1 and r.attained == 0
    run.step(5.0)
    assert r.attained == 5.0


# -- perception --------------------------------------------------------------------------------------------------------


def test_perceptible_from_the_round_in_which_the_rate_has_been_stable():
    policy, r = order(window=3, tolerance=0.1, draft_tokens=4, draft_token_ms=10, verify_ms=60), request(length=50)
    # accepted / proposed so far: 1, 1/2, 7/12, 9/16, 11/20. The last three span 7/12 − 11/20 < 0.1 for the first time.
    for accepted in (4, 0, 3, 2):
        assert policy.perceived(r) is None
        after_round(policy, r, 0.1, 4, accepted)
    rate = fmean([1 / 2, 7 / 12, 9 / 16])
    assert policy.perceived(r) == pytest.approx(50 * (4 * 0.010 + 0.060) / (4 * rate + 1))
    after_round(policy, r, 0.1, 4, 0)
    assert policy.perceived(r) == pytest.approx(50 * (4 * 0.010 + 0.060) / (4 * rate + 1))  # once and for all


def test_a_span_of_just_the_tolerance_is_not_stable():
    policy, r = order(window=2, tolerance=0.25), request()
    after_round(policy, r, 0.1, 2, 1)
    after_round(policy, r, 0.1, 2, 2)  # 0.5, 0.75
    assert policy.perceived(r) is None
    after_round(policy, r, 0.1, 2, 2)  # 0.75, 0.83
    assert policy.perceived(r) is not None


def test_n_is_the_mean_of_what_was_drafted_unless_it_is_given():
    policy, r = order(window=2, tolerance=2, draft_token_ms=10, verify_ms=50), request(length=60)
    after_round(policy, r, 0.1, 2, 1)
    after_round(policy, r, 0.1, 6, 3)  # rates 1/2, 1/2; n is 4
    assert policy.perceived(r) == pytest.approx(60 * (4 * 0.010 + 0.050) / (4 * 0.5 + 1))


def test_plain_decoding_takes_its_length_times_a_verification():
    for settings in ({}, {"draft_tokens": 4}, {"draft_tokens": 4, "draft_token_ms": 5, "verify_ms": 200}):
        policy, r = order(window=3, **settings), request(length=40)
        for _ in range(3):
            after_round(policy, r, 0.2)
        assert policy.perceived(r) == pytest.approx(40 * 0.2)


def test_the_perceived_time_decides_the_queue():
    policy = order(window=2, queues=4, growth=2, first_threshold_ms=1000, verify_ms=100)
    for length, queue in ((10, 1), (11, 2), (20, 2), (21, 3), (40, 3), (41, 4), (4000, 4)):
        r = request(length, length)
        after_round(policy, r)
        after_round(policy, r)
        assert (policy.queue(r), policy.perceived(r)) == (queue, pytest.approx(length * 0.1))


def test_a_perceptible_request_that_outlives_its_estimate_is_demoted_too():
    policy, r = order(window=2, queues=3, growth=2, first_threshold_ms=1000, verify_ms=100), request(length=5)
    for _ in range(10):
        after_round(policy, r)
    assert policy.queue(r) == 1
    after_round(policy, r)
    assert policy.queue(r) == 2


def test_a_new_prediction_moves_a_perceptible_request():
    policy, r = order(window=2, queues=3, growth=2, first_threshold_ms=1000, verify_ms=100), request(length=5)
    after_round(policy, r)
    after_round(policy, r)
    assert policy.key(r) == (1, 0, pytest.approx(0.5))
    r.predicted_len = 15
    assert policy.key(r) == (2, 0, pytest.approx(1.5))


def test_without_a_prediction_the_length_is_the_most_it_may_write():
    policy, r = order(window=2, verify_ms=100), request(length=None)
    after_round(policy, r)
    after_round(policy, r)
    assert policy.perceived(r) == pytest.approx(30.0)


def test_what_is_not_given_is_learned_from_the_rounds():
    cost = DraftedStepTimes()
    for n, seconds in ((0, 0.05), (4, 0.09), (8, 0.13), (2, 0.07)):
        cost.observe(n, seconds)
    assert (cost.draft, cost.verify) == (pytest.approx(0.010), pytest.approx(0.050))
    alike = DraftedStepTimes()
    for _ in range(5):
        alike.observe(4, 0.09)
    assert alike.seconds(4) == pytest.approx(0.09)
    half = DraftedStepTimes(draft=0.005)
    half.observe(4, 0.09)
    assert half.verify == pytest.approx(0.07)
    assert DraftedStepTimes().seconds(3) == 0.0


# -- order -------------------------------------------------------------------------------------------------------------


def test_queues_then_perception_then_time_or_arrival():
    policy = order(window=2, queues=3, growth=2, first_threshold_ms=1000, verify_ms=100)
    fresh, served, quick, slow, late = (request(i, 12) for i in range(5))
    slow.predicted_len = 14
    after_round(policy, served, 1.5)  # queue 2, non-perceptible
    for r in (quick, slow):
        after_round(policy, r)
        after_round(policy, r)  # queue 2, 1.2 and 1.4 s
    line = sorted([slow, served, late, quick, fresh], key=policy.key)
    assert [r.number for r in line] == [0, 4, 2, 3, 1]


def test_the_non_perceptible_are_preempted_and_resumed():
    run = Steps(order="laps_sd", laps_sd={"first_threshold_ms": 2000, "growth": 2, "window": 50})
    run.add("a", 9)
    assert run.steps(2) == "a a"
    run.add("b", 9)
    # The prefill step is no round: three rounds are more than two seconds. Then b is alone in queue 1.
    assert run.steps(7) == "a a b b b b a"
    run.add("c", 1)
    plan = run.plan()
    assert [r.id for r in plan.paused] == ["a"] and [w.request.id for w in plan.scheduled] == ["c"]
    run.answer(plan)
    assert run.finish() == ["c", "a", "b"]
    assert run.scheduler.num_pauses == 5 and run.scheduler.num_preemptions == 0


def test_the_perceptible_are_not_preempted():
    run = Steps(
        order="laps_sd", predictor="oracle",
        laps_sd={"first_threshold_ms": 3000, "growth": 2, "window": 2, "verify_ms": 1000},
    )  # fmt: skip
    a = run.add("a", 20)
    run.steps(3)  # prefill and two rounds: perceptible, 20 s, the last queue
    laps = run.scheduler.order
    assert isinstance(laps, LapsSd) and laps.perceived(a) == pytest.approx(20)
    assert laps.preemptible(a)
    run.step()
    assert not laps.preemptible(a)
    run.add("b", 1)
    run.add("c", 1)
    assert run.steps(16) == " ".join(["a"] * 16) and a.status is RequestStatus.FINISHED
    assert run.scheduler.num_pauses == 0 and run.finish() == ["a", "b", "c"]


def test_who_becomes_perceptible_competes_once_more_from_its_new_queue():
    run = Steps(
        order="laps_sd", predictor="oracle",
        laps_sd={"first_threshold_ms": 3000, "growth": 2, "window": 2, "verify_ms": 1000},
    )  # fmt: skip
    run.add("a", 20)
    run.add("b", 4)
    # b comes before a as soon as a's time is known; b's 4 s bring it to queue 2, before a in the last one.
    assert run.steps(10) == "a a a b b b b a a a"


def test_with_a_batch_the_first_of_the_order_run():
    run = Steps(seqs=2, order="laps_sd", laps_sd={"first_threshold_ms": 2000, "growth": 2, "window": 50})
    for name in "abcd":
        run.add(name, 30)
    assert run.steps(9) == "ab ab ab ab cd cd cd cd ab"


def test_the_unknown_may_stand_where_a_typical_request_would():
    policy = order(window=2, tolerance=0.5, verify_ms=100, unknown="typical")
    first, slow, quick, short, long = request(0, 50), request(1, 30), request(2, 30), request(3, 20), request(4, 60)
    keys = policy.key(short), policy.key(long)
    for r, accepted in ((first, 4), (slow, 0), (quick, 8)):
        for _ in range(2):
            after_round(policy, r, proposed=8, accepted=accepted)
    # 100 ms a round give first 5 tokens, slow 1 and quick 9: relative to the mean of the three, 0.46, 2.3 and 0.25.
    assert (policy.key(short), policy.key(long)) == keys  # what waits keeps its place
    assert [r.number for r in sorted([first, slow, quick, short, long], key=policy.key)] == [2, 3, 0, 4, 1]


def test_all_the_perceptible_are_compared_with_the_mean_of_all():
    policy = order(window=2, tolerance=0.5, verify_ms=100, unknown="typical")
    first, second, third = (request(i, 30) for i in range(3))
    for r, accepted in ((first, 0), (second, 8)):
        for _ in range(2):
            after_round(policy, r, proposed=8, accepted=accepted)
    # 100 ms a token and 11 ms: the first is slower than the mean of both, though it was the mean at first.
    mean = (100 + 100 / 9) / 2
    assert policy.key(first)[-1] == pytest.approx(30 * 100 / mean) and policy.key(third)[-1] == 30
    assert list(policy.rekeyed()) == [first, second] and not policy.rekeyed()


def test_a_paused_request_moves_when_the_mean_changes():
    run = Steps(seqs=1, order="laps_sd", laps_sd={"unknown": "typical", "window": 2, "tolerance": 1, "verify_ms": 1000})

    def turn(**drafts: tuple[int, int]) -> None:
        plan = run.plan()
        run.answer(plan, 1.0, {s.request.id: next(iter(drafts.values())) for s in plan.scheduled})

    slow = run.add("slow", 50, predicted_len=30)
    for _ in range(3):
        turn(drafts=(4, 0))  # perceptible after its prefill and two rounds, one token in a second
    quick = run.add("quick", 50, predicted_len=29)  # goes first: it is shorter, and counts as typical
    late = run.add("late", 50, predicted_len=36)
    for _ in range(3):
        turn(drafts=(4, 4))  # perceptible: five tokens in a second
    assert slow.status is RequestStatus.PAUSED and quick.output_len == 3
    # Relative to the mean, slow now counts as 30 / 0.6 = 50 tokens, more than late's 36.
    assert list(run.scheduler.waiting.ahead()) == [late, slow]


def test_a_known_acceptance_rate_makes_a_request_perceptible_at_once():
    policy = order(acceptance="oracle", draft_tokens=4, draft_token_ms=10, verify_ms=0.001)
    r, unknown = request(0, 50), request(1, 50)
    r.true_acceptance = 0.5
    assert policy.perceived(r) == pytest.approx(50 * 0.040001 / 3) and policy.perceived(unknown) is None


def test_known_acceptance_rates_of_waiting_requests_are_compared_with_the_mean_of_all():
    known = {"acceptance": "oracle", "draft_tokens": 4, "draft_token_ms": 10, "verify_ms": 60, "unknown": "typical"}
    run = Steps(order="laps_sd", laps_sd=known)
    for name, rate in (("a", 0.1), ("b", 0.9), ("c", 0.5)):
        run.add(name, 20, predicted_len=20, true_acceptance=rate)
    assert [r.id for r in run.scheduler.waiting.ahead()] == ["b", "c", "a"]


# -- shrinkage ---------------------------------------------------------------------------------------------------------


def test_a_posterior_mean_needs_finished_requests():
    prior = AcceptancePrior()
    for rate in (0.2, 0.4, 0.6, 0.8, 0.3, 0.5, 0.7):
        prior.learn(rate + 0.1, 4, rate, 1000)
        assert prior.posterior(0.9, 4) == 0.9 and prior.concentration is None
    prior.learn(0.3, 4, 0.5, 1000)
    # Mean 0.5, variance 0.035; noise a round 4 (7 * 0.01 + 0.04) / 8 = 0.055.
    assert prior.concentration == pytest.approx(0.055 / 0.035, rel=0.01)
    shrunk = [prior.posterior(0.9, rounds) for rounds in (4, 40, 4000)]
    assert shrunk == pytest.approx([0.787, 0.885, 0.8998], abs=0.001)


def test_requests_that_do_not_differ_are_all_expected_at_the_mean():
    prior = AcceptancePrior()
    for estimate in (0.2, 0.8) * 5:
        prior.learn(estimate, 3, 0.5, 50)
    assert prior.posterior(0.1, 3) == pytest.approx(0.5)


def error(gamma: int, delta: float, shrinkage: bool) -> float:
    """Mean relative error of the perceived times of 300 requests served one after the other."""
    n, count, random = 8, 300, np.random.default_rng(5)
    policy = order(
        window=gamma, tolerance=delta, draft_tokens=n, draft_token_ms=1, verify_ms=20, shrinkage=shrinkage
    )  # fmt: skip
    drafts = Sampled(Process(0.64, 0.15, wander=1.0, settle=50), count, random)
    errors = []
    for i, length in enumerate(random.integers(80, 400, count).tolist()):
        r, produced, estimate, seconds = request(i, length), 1, None, 0.0
        while produced < length:
            accepted = drafts.round(i, produced, n)[1]
            produced += accepted + 1
            seconds += 0.028
            r.attained, r.proposed, r.accepted = seconds, r.proposed + n, r.accepted + accepted
            end = "stop" if produced >= length else None
            policy.observe(r, RequestResult((0,) * (accepted + 1), end, n, accepted), 0.028)
            estimate = policy.perceived(r) if estimate is None else estimate
        if estimate is not None:
            errors.append(abs(estimate / seconds - 1))
    return fmean(errors)


@pytest.mark.parametrize(("gamma", "delta", "share"), [(3, 0.1, 0.65), (5, 0.05, 0.8), (10, 0.02, 0.97)])
def test_shrinkage_estimates_execution_times_better(gamma: int, delta: float, share: float):
    assert error(gamma, delta, True) < share * error(gamma, delta, False)


# -- Figure 1 ----------------------------------------------------------------------------------------------------------

#: Output tokens and acceptance rate; all arrive at once, in this order.
FIGURE_1 = {"R1": (10, 0.5), "R2": (5, 0.1), "R3": (12, 0.8)}
#: Seconds that a candidate token takes to be verified; drafting takes none.
CANDIDATE = 0.010


def mean_latency(policy: PolicyConfig) -> float:
    """A step verifies the candidates up to the next accepted one: length / acceptance rate of them in all."""
    scheduler = Scheduler(SchedulerConfig(1, 8, 64, None, 8, policy), PagePool(16, 4))
    for name, (length, rate) in FIGURE_1.items():
        scheduler.add(Request(name, 1, [0], length, 0.0, true_acceptance=rate), 0.0)
    now, ends = 0.0, []
    while scheduler.has_work:
        plan = scheduler.plan(now)
        (scheduled,) = plan.scheduled
        length, rate = FIGURE_1[scheduled.request.id]
        written = scheduled.request.output_len
        candidates = round((written + 1) / rate) - round(written / rate)
        now += candidates * CANDIDATE
        end = "length" if written + 1 == length else None
        scheduler.update(plan, [RequestResult((1,), end, candidates, 1)], now, candidates * CANDIDATE)
        if end:
            ends.append(now)
    return fmean(ends)


def test_figure_1():
    full = {"acceptance": "oracle", "draft_tokens": 16, "draft_token_ms": 0, "verify_ms": 160}
    assert mean_latency(PolicyConfig(order="fcfs")) == pytest.approx(0.583, abs=5e-4)
    assert mean_latency(PolicyConfig(order="sjf", predictor="oracle")) == pytest.approx(0.683, abs=5e-4)
    laps = PolicyConfig.model_validate({"order": "laps_sd", "predictor": "oracle", "laps_sd": full})
    assert mean_latency(laps) == pytest.approx(0.450, abs=5e-4)
