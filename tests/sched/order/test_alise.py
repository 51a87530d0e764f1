"""ALISE's order: the runtime model, queues, demotion, aging."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from helpers.steps import Steps
from jaxspec.sched import Plan, PolicyConfig, Request, RequestResult, ScheduledRequest, SwapCosts
from jaxspec.sched.order.alise import Alise, AliseSettings
from jaxspec.sched.timing import Regression, Runtime

COSTS = SwapCosts(0.0, 0.0, prefill_token=0.01, decode_step=1.0)


def request(name: str = "r", prompt: int = 10, output: int = 0, predicted: float | None = None) -> Request:
    return Request(
        name, prompt, [0] * (prompt + output), 100, 0.0, predicted_len=predicted, computed=prompt + output - 1
    )


# --- the runtime model ------------------------------------------------------------------------------------------------


def test_a_line_is_fitted_as_numpy_does():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=50), rng.normal(size=50)
    line = Regression(1000)
    assert line.slope is None
    for pair in zip(x.tolist(), y.tolist(), strict=True):
        line.observe(*pair)
    slope, offset = np.polyfit(x, y, 1)
    assert line.slope is not None and line.slope == pytest.approx(slope)
    assert line.y - line.slope * line.x == pytest.approx(offset)


def test_old_observations_fade():
    line = Regression(20)
    for i in range(100):
        line.observe(i % 5, 1.0 * (i % 5))
    for i in range(200):
        line.observe(i % 5, 3.0 * (i % 5))
    assert line.slope == pytest.approx(3.0, rel=0.01)


def test_before_any_step_the_profile_or_a_guess_says_how_long_requests_take():
    assert Runtime(COSTS).remaining(request(predicted=5)) == pytest.approx(10 * 0.01 + 5)
    short, long = (Runtime().remaining(request(predicted=n)) for n in (5, 50))
    assert 0 < short < long
    assert Runtime(COSTS).remaining(request()) == pytest.approx(0.1 + 100)  # without a prediction: max_tokens


def test_what_is_left_shrinks_to_one_token():
    left = [Runtime(COSTS).remaining(request(output=n, predicted=3)) for n in (0, 1, 2, 3, 9)]
    assert left == pytest.approx([3.1, 2, 1, 1, 1])


def test_the_model_finds_the_times_of_steps():
    """Steps of a machine with known a, b, c and d, prefill and decoding mixed, some rounds giving several tokens."""
    a, b, c, d = 0.002, 0.05, 0.0004, 0.03
    rng, model = np.random.default_rng(1), Runtime()
    for _ in range(600):
        decoding = [request(prompt=int(rng.integers(1, 500)), output=5) for _ in range(rng.integers(0, 5))]
        tokens = int(rng.integers(1, 4))
        mean = fmean(r.prompt_len for r in decoding) if decoding else 0.0
        seconds = (c * mean + d) if decoding else 0.0
        scheduled = [ScheduledRequest(r, r.computed, 1) for r in decoding]
        results = [RequestResult((0,) * tokens)] * len(scheduled)
        if not decoding or rng.random() < 0.3:
            count = int(rng.integers(10, 400))
            new = Request("new", count, [0] * count, 5, 0.0)
            scheduled.append(ScheduledRequest(new, 0, count))
            results.append(RequestResult((0,)))
            seconds += a * count + b
            # A step with a prompt in it says what the prompt takes; `tokens` drafts or not, decoding takes its usual.
        else:
            seconds *= tokens
        model.observe(Plan(tuple(scheduled)), results, seconds)
    assert (model.a, model.b, model.c, model.d) == pytest.approx((a, b, c, d), rel=0.3)


def test_no_coefficient_is_ever_negative():
    model = Runtime()
    for n in range(1, 40):  # longer prompts take less time
        r = request(prompt=n, output=2)
        model.observe(Plan((ScheduledRequest(r, r.computed, 1),)), [RequestResult((0,))], 1 / n)
    assert model.c == 0 and model.d > 0


# --- queues -----------------------------------------------------------------------------------------------------------


def order(**more: float) -> Alise:
    return Alise(
        AliseSettings.model_validate({"queues": 4, "first_threshold_ms": 5000, "growth": 2, **more}), Runtime(COSTS)
    )


def test_queues_hold_ever_more_time():
    place = {n: order().queue(request(prompt=1, predicted=n)) for n in (1, 4, 6, 9, 12, 19, 25, 90)}
    assert place == {1: 0, 4: 0, 6: 1, 9: 1, 12: 2, 19: 2, 25: 3, 90: 3}


def test_a_request_moves_up_as_it_comes_nearer_to_its_end():
    alise, r = order(), request(predicted=12)
    seen = []
    for _ in range(12):
        seen.append(alise.queue(r))
        r.tokens.append(0)
    assert seen == [2, 2, *[1] * 5, *[0] * 5]


def test_one_that_outlives_its_prediction_is_demoted_for_good():
    alise, r = order(), request(predicted=1)
    assert alise.queue(r) == 0
    places = []
    for predicted in (2, 4, 4, 8, 8, 8, 8, 16):
        r.tokens.append(0)
        r.predicted_len = predicted
        places.append(alise.queue(r))
    # Four more tokens would be a matter of the first queue; three demotions have closed the first three to it.
    assert places == [1, 2, 2, 3, 3, 3, 3, 3]


def test_a_late_prediction_is_no_misprediction():
    alise, r = order(), request(predicted=90)
    assert alise.queue(r) == 3
    r.predicted_len = 2
    assert alise.queue(r) == 0


def test_what_waits_keeps_its_place_while_the_model_learns():
    alise, r = order(), request(predicted=4)
    assert alise.queue(r) == 0
    alise._runtime.d = 100.0
    assert alise.queue(r) == 0
    r.tokens.append(0)
    assert alise.queue(r) == 3


# --- in the scheduler -------------------------------------------------------------------------------------------------


def steps(**more: float) -> Steps:
    alise = {"queues": 5, "first_threshold_ms": 4000, **more}
    return Steps(order="alise", predictor="oracle", alise=alise, costs=COSTS)


def test_the_shorter_one_preempts_if_it_is_in_a_higher_queue():
    run = steps()
    run.add("long", true_len=20)
    assert run.step() == ["long"]
    run.add("short", true_len=3)
    run.add("next", true_len=2)
    assert run.finish() == ["short", "next", "long"]


def test_within_a_queue_no_request_is_preempted():
    run = steps()
    run.add("a", true_len=7)
    run.step()
    run.add("b", true_len=5)
    assert run.finish() == ["a", "b"]
    assert run.scheduler.num_pauses == 0


def test_a_wrong_prediction_costs_its_turn():
    run = steps()
    run.add("liar", max_tokens=30, predicted_len=2)
    run.add("honest", true_len=6)
    run.steps(2)
    # It has outlived its prediction: four tokens now, and its next queue is that of the other one, which is younger.
    assert run.requests["liar"].predicted_len == 4
    assert run.finish() == ["honest", "liar"]


def test_aging_promotes():
    run = Steps(order="alise", predictor="oracle", aging_ms=6000, costs=COSTS, alise={"first_threshold_ms": 4000})
    run.add("long", true_len=9)
    for i in range(12):
        run.add(f"short{i:02}", true_len=2)
        run.step()
    assert "long" in run.finish()[:6]


def test_the_runtime_model_learns_from_the_steps():
    run = steps()
    run.add("a", true_len=40, prompt=5)
    while run.scheduler.has_work:
        run.step(2.0)
    assert run.scheduler.runtime.d == pytest.approx(2.0, rel=0.4)


def test_settings_are_checked():
    for name, value in (("queues", 0), ("growth", 1.0), ("first_threshold_ms", 0)):
        with pytest.raises(ValueError, match=name):
            PolicyConfig.model_validate({"alise": {name: value}})
    with pytest.raises(ValueError, match="alise preempts"):
        PolicyConfig(order="alise", batching="dynamic")
    with pytest.raises(ValueError, match="memory"):
        PolicyConfig.model_validate({"memory": "disk"})
