"""Workloads, cost models and acceptance processes: read, made up, fitted."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Process, Sampled, fit, load_process
from jaxspec.sched.sim.cost import (
    LLAMA_7B_L20,
    PAPER_SCALE,
    SSJF,
    Linear,
    Profiled,
    StepLoad,
    load_cost,
    load_profile,
    v100,
)
from jaxspec.sched.sim.workload import (
    Lengths,
    Workload,
    class_accuracy,
    class_means,
    join,
    noise_of_accuracy,
    noisy,
    read_jsonl,
    read_lengths,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- workloads --------------------------------------------------------------------------------------------------------


def test_lengths_from_csv_with_predicted_classes(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("output_tokens,pred_class2,guess\n10,0,12\n30,0,20\n100,1,90\n0,1,1\n")
    lengths = read_lengths(path, "pred_class2")
    # A class is worth the mean of its rows; the answer without tokens is no request but was in its class.
    assert lengths.predicted.tolist() == [20, 20, 50]
    assert lengths.output.tolist() == [10, 30, 100]
    assert read_lengths(path, "guess").predicted.tolist() == [12, 20, 90]
    assert np.isnan(read_lengths(path).predicted).all()


def test_lengths_from_prompts_with_answers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["x" * 40], "reference": "y" * 20}, {"turns": ["no answer"]}, {"turns": ["a"], "reference": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    lengths = read_lengths(path)
    assert lengths.input.tolist() == [10, 1] and lengths.output.tolist() == [5, 1]


@pytest.mark.parametrize(
    ("name", "text", "prediction", "message"),
    [
        ("a.csv", "tokens\n1\n", None, "no column output_tokens"),
        ("a.csv", "output_tokens\n1\n", "pred", "no column pred"),
        ("a.csv", "output_tokens\n1\nmany\n", None, "line 3"),
        ("a.csv", "output_tokens\n", None, "no rows"),
        ("a.jsonl", '{"turns": ["q"]}\n', None, "no line has a 'reference'"),
        ("a.jsonl", '{"turns": ["q"], "reference": "r"}\nnothing\n', None, "line 2"),
        ("a.jsonl", '{"turns": ["q"], "reference": "r"}\n', "pred", "no column pred"),
    ],
)
def test_bad_tables_are_named(tmp_path, name, text, prediction, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / name, prediction)


def test_join_draws_whole_rows():
    lengths = Lengths(np.array([1, 0]), np.array([10, 20]), np.array([11.0, 22.0]))
    scheduled = join(arrivals.burst(200), lengths, 7, rng())
    assert set(zip(scheduled.input.tolist(), scheduled.output.tolist(), scheduled.predicted.tolist(), strict=True)) == {
        (1, 10, 11.0), (7, 20, 22.0),
    }  # fmt: skip


def test_join_takes_a_trace_as_it_is():
    trace = [arrivals.Arrival(0.0, 30, 0), arrivals.Arrival(2.0, None, 9)]
    scheduled = join(trace, None, 5, rng())
    assert (scheduled.input.tolist(), scheduled.output.tolist()) == ([30, 5], [1, 9])
    with pytest.raises(ValueError, match="output_tokens"):
        join(arrivals.burst(2), None, 5, rng())


@pytest.mark.parametrize(
    ("arrival", "output", "message"), [([1, 0], [1, 1], "ascend"), ([0, 1], [1, 0], "output"), ([0, 1], [1], "output")]
)
def test_workloads_that_make_no_sense(arrival, output, message):
    with pytest.raises(ValueError, match=message):
        Workload(np.array(arrival, float), np.array([1, 1]), np.array(output), np.array([np.nan, np.nan]))


def test_noise_is_made_to_an_accuracy():
    output, bounds = rng().integers(1, 512, 20_000), [58, 147, 280, 499]
    sigma = noise_of_accuracy(output, 0.6, bounds, rng(1))
    assert class_accuracy(noisy(output, sigma, rng(2)), output, bounds) == pytest.approx(0.6, abs=0.02)
    assert class_accuracy(noisy(output, 0.0, rng(2)), output, bounds) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=40))
def test_class_means_against_a_loop(rows):
    classes, output = np.array([c for c, _ in rows]), np.array([o for _, o in rows])
    for c, got in zip(classes, class_means(classes, output), strict=True):
        assert got == pytest.approx(output[classes == c].mean())


# --- cost models ------------------------------------------------------------------------------------------------------


def test_ssjf_reckons_as_the_paper_says():
    # T = C + K·N: the shortest job takes 120 ms (§4.2), whatever the batch.
    assert SSJF.seconds(StepLoad(64, starting=1)) == pytest.approx(0.12)
    assert SSJF.seconds(StepLoad(4)) == SSJF.seconds(StepLoad(1))
    assert 512 * v100("opt-1.3b").seconds(StepLoad(1)) == pytest.approx(1.243)
    with pytest.raises(ValueError, match=r"opt-1\.3b"):
        v100("opt-13b")


def test_llama_on_l20_is_bound_by_its_weights_and_switches_as_fig_2_says():
    cost = LLAMA_7B_L20
    assert cost.seconds(StepLoad(1)) == pytest.approx(13.48e9 / (0.8 * 864e9), rel=0.02)
    # Verifying nine tokens instead of one is nearly free: the plateau that speculation lives on.
    assert cost.seconds(StepLoad(9)) < 1.1 * cost.seconds(StepLoad(1))
    # LAPS-SD Fig. 2: 500 tokens, at SpecInfer's 2.73 tokens a round of 8 drafts, switched every 80 ms: 14.21 % more.
    alone = 500 / 2.73 * cost.seconds(StepLoad(9, context=250, drafting=1, levels=8))
    switches = alone / 0.08
    assert switches * 2 * 250 * cost.swap / alone == pytest.approx(0.1421, abs=0.02)


@settings(deadline=None)  # the first example also loads LAPACK
@given(st.integers(0, 10**6))
def test_profiles_are_fitted_from_steps(seed):
    random = rng(seed)
    true = Profiled((8, 16, 64), (0.010, 0.014, 0.030), position=2e-6, draft_level=0.002)
    loads = [
        StepLoad(int(t), context=int(c), levels=int(v))
        for t, c, v in zip(
            random.integers(1, 65, 300), random.integers(0, 4000, 300), random.integers(0, 5, 300), strict=True
        )
    ]
    seconds = [true.seconds(load) * random.uniform(0.99, 1.01) for load in loads]
    seconds[7] += 3.0  # the machine paused
    found = Profiled.fit(loads, seconds, [8, 16, 64], "test")
    assert found.step == pytest.approx(true.step, rel=0.05)
    assert (found.position, found.draft_level) == pytest.approx((2e-6, 0.002), rel=0.15)


def test_sizes_never_seen_are_continued():
    found = Profiled.fit([StepLoad(5), StepLoad(30), StepLoad(6)], [0.01, 0.03, 0.01], [8, 16, 32, 64], "")
    assert found.step == pytest.approx((0.01, 0.01 + 0.02 / 3, 0.03, 0.06))
    # More than the largest is as many of it.
    assert found.seconds(StepLoad(128)) == pytest.approx(0.12)
    with pytest.raises(ValueError, match="0 steps"):
        Profiled.fit([], [], [8], "")


#: What `record` saw once: of a size there are three steps, one of them slow, and hundreds of a small size.
SHORT = [(8, 0.0012 * (1 + 0.001 * (i % 9 - 4))) for i in range(60)]
SHORT += [(24, 0.00232), (24, 0.00461), (24, 0.00212), (32, 0.0037)]


def test_a_size_with_few_steps_is_not_free():
    loads = [StepLoad(n, context=i % 60 + 100) for i, (n, _) in enumerate(SHORT)]
    found = Profiled.fit(loads, [s for _, s in SHORT], [8, 16, 24, 32], "")
    assert found.step[0] == pytest.approx(0.0012, rel=0.05)
    assert 0.0019 < found.step[2] < 0.0032  # the median is 2.32 ms
    assert found.step[0] <= found.step[1] <= found.step[2] <= found.step[3]


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[StepLoad], list[float], list[int]]:
    """Steps of a machine whose times rise with the size, spoiled in every way: noise, pauses, few steps, extras that go
    along with the size."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24, 32, 64, 128, 256]), min_size=1, max_size=8, unique=True))
    random = rng(draw(st.integers(0, 10**6)))
    slope, noise = draw(st.floats(0, 1e-3)), draw(st.floats(0, 0.5))
    loads, seconds = [], []
    for size in sorted(sizes):
        for _ in range(draw(st.integers(0, 12))):
            context = int(random.integers(0, 2000)) + 100 * size * draw(st.booleans())
            pause = draw(st.sampled_from([0.0] * 9 + [0.02, 3.0]))
            took = 1e-3 + slope * size + 1e-6 * context
            loads.append(StepLoad(size, context=context, levels=int(random.integers(0, 5))))
            seconds.append(took * float(random.uniform(1 - noise, 1 + noise)) + pause)
    if not loads:
        loads, seconds = [StepLoad(sizes[0])], [1e-3]
    return loads, seconds, sizes


@settings(deadline=None)
@example((  # the only step of size 2 is a pause: its time is interpolated
    [StepLoad(1, context=444, levels=4), StepLoad(2, context=1372, levels=4), StepLoad(4, context=635, levels=4),
     StepLoad(4, context=915, levels=4), StepLoad(4, context=1217, levels=1), StepLoad(4, context=329, levels=1),
     StepLoad(4, context=840)],
    [0.00123, 0.0245, 0.00299, 0.00256, 0.00486, 0.0236, 0.0023], [1, 2, 4],
))  # fmt: skip
@given(recordings())
def test_fitted_times_are_plausible_whatever_was_recorded(recorded):
    loads, seconds, sizes = recorded
    found = Profiled.fit(loads, seconds, sizes, "")
    assert list(found.buckets) == sorted(sizes)
    assert all(a <= b for a, b in itertools.pairwise(found.step))
    assert min(found.position, found.draft_level) >= 0
    for size, step in zip(found.buckets, found.step, strict=True):
        # Sizes without a step, or whose steps may all have been pauses, are interpolated.
        seen = any(load.tokens == size and s < 0.02 for load, s in zip(loads, seconds, strict=True))
        above = [s for load, s in zip(loads, seconds, strict=True) if load.tokens >= size]
        assert step >= (0.2 * min(above) if seen else 1e-6)
        assert step <= 1.01 * max(seconds) * max(1, size / max(load.tokens for load in loads))


def test_a_pause_in_the_only_step_of_a_size_spoils_no_other():
    loads = [StepLoad(1), *(StepLoad(n) for n in (8, 16) for _ in range(5))]
    found = Profiled.fit(loads, [3.0] + 5 * [0.01] + 5 * [0.02], [1, 8, 16], "")
    assert found.step == pytest.approx((0.01, 0.01, 0.02))


def test_a_fit_needs_steps_that_took_time():
    assert Profiled.fit([StepLoad(4), StepLoad(4)], [0.0, 0.01], [4], "").step == pytest.approx((0.01,))
    with pytest.raises(ValueError, match="nothing was measured"):
        Profiled.fit([StepLoad(4)], [0.0], [4], "")


def test_profiles_survive_a_file(tmp_path):
    profile = Profiled((1, 8), (0.01, 0.02), 1e-6, 0.001, "here")
    profile.save(tmp_path / "p.json")
    assert load_cost(str(tmp_path / "p.json")) == profile
    assert load_cost("ssjf") == PAPER_SCALE["ssjf"] == Linear(step=0.02, start=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "needs the fields"), ("no", "Expecting"), ('{"buckets": [1]}', "needs the fields"),
        ('{"buckets": [8, 1], "step": [1, 1]}', "ascending"), ('{"buckets": [1], "step": [0]}', "positive"),
        ('{"buckets": [1], "step": [1], "colour": 2}', "may have"),
        ('{"buckets": [1, 8], "step": [0.002, 1e-9]}', "8 tokens cannot take 1e-06 ms .*1: 2, 8: 1e-06.*again"),
        ('{"buckets": [1, 8], "step": [0.01, 0.003]}', "8 tokens cannot take 3 ms"),
        ('{"buckets": [1], "step": [NaN]}', "positive seconds"),
        ('{"buckets": [1], "step": [Infinity]}', "positive seconds"),
        ('{"buckets": [1], "step": [1], "position": -1}', "not negative"),
        ('{"buckets": [1], "step": [1], "draft_level": NaN}', "not negative"),
    ],
)  # fmt: skip
def test_bad_profiles_are_named(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_profile(path)


def test_unknown_cost_models_are_named():
    with pytest.raises(ValueError, match="llama-7b-l20"):
        load_cost("h100")


# --- acceptance -------------------------------------------------------------------------------------------------------


def traces(process: Process, requests: int, tokens: int, drafts: int, seed: int) -> list[list[tuple[int, int]]]:
    sampled, out = Sampled(process, requests, rng(seed)), []
    for i in range(requests):
        trace: list[tuple[int, int]] = []
        produced = 0
        while produced < tokens:
            trace.append(sampled.round(i, produced, drafts))
            produced += trace[-1][1] + 1
        out.append(trace)
    return out


def test_accepted_counts_are_truncated_geometric():
    got = np.array([a for t in traces(Process(0.7), 50, 400, 3, 0) for _, a in t])
    shares = np.bincount(got, minlength=4) / got.size
    assert shares == pytest.approx([0.3, 0.21, 0.147, 0.343], abs=0.015)
    # What oracles are told is what comes of it.
    assert got.mean() / 3 == pytest.approx(Sampled(Process(0.7), 1, rng()).share(0, 3), abs=0.01)


def test_it_wanders_early_and_settles():
    rows = traces(Process(0.6, 0.0, wander=2.0, settle=30), 300, 400, 4, 1)

    def scatter(part: slice) -> float:
        return float(np.std([np.mean([a for _, a in row[part]]) for row in rows]))

    assert scatter(slice(0, 8)) > 1.4 * scatter(slice(-8, None))


def test_the_process_is_found_again_from_traces():
    true = Process(0.65, 0.12, wander=1.0, settle=60, memory=0.8)
    found = fit(traces(true, 500, 300, 4, 2))
    assert (found.mean, found.spread) == pytest.approx((true.mean, true.spread), abs=0.03)
    assert found.memory == pytest.approx(true.memory, abs=0.2)
    early = lambda p: p.wander * np.exp(-20 / p.settle)  # noqa: E731
    assert early(found) == pytest.approx(early(true), rel=0.3)
    # One that never wanders is not said to.
    assert fit(traces(Process(0.5, 0.1), 500, 300, 4, 3)).wander < 0.4


def test_rates_have_the_requested_spread():
    rates = Process(0.7, 0.1).rates(20_000, rng())
    assert (rates.mean(), rates.std()) == pytest.approx((0.7, 0.1), abs=0.01)


def test_short_traces_cannot_be_fitted():
    with pytest.raises(ValueError, match="8 rounds"):
        fit([[(4, 2)] * 7])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mean": 1.0}, "mean"), ({"mean": 0.5, "spread": 0.5}, "spread"), ({"mean": 0.5, "settle": 0}, "settle"),
     ({"mean": 0.5, "memory": 1.0}, "memory"), ({"mean": 0.5, "wander": -1}, "wander")],
)  # fmt: skip
def test_processes_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Process(**settings)


def test_processes_survive_a_file(tmp_path):
    process = Process(0.6, 0.1, 0.5, 40, 0.7)
    process.save(tmp_path / "a.json")
    assert load_process(str(tmp_path / "a.json")) == process
    assert load_process("0.6") == Process(0.6)
    for text, message in (("1.5", "between 0 and 1"), ("none.json", "neither a rate")):
        with pytest.raises(ValueError, match=message):
            load_process(text)
    (tmp_path / "b.json").write_text('{"rate": 0.5}')
    with pytest.raises(ValueError, match="needs the field mean"):
        load_process(str(tmp_path / "b.json"))


def test_jsonl_needs_turns(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"reference": "r"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_jsonl(tmp_path / "p.jsonl")
