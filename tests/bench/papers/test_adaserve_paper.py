"""`jaxspec.bench paper adaserve`: what is compared, and the page that is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.adaserve import cases, report
from jaxspec.bench.papers.adaserve import engine as adaserve_engine
from jaxspec.bench.papers.adaserve import experiment as adaserve
from jaxspec.bench.papers.adaserve.cases import Case, Data
from jaxspec.bench.papers.adaserve.gains import curves, gains
from jaxspec.bench.papers.adaserve.requests import (
    CONTEXT,
    MIX,
    TARGETS,
    Categories,
    capped,
    read_answers,
    stratified,
    strict_share,
)
from jaxspec.bench.papers.adaserve.systems import (
    BASELINES,
    BLIND,
    EQUAL,
    FCFS,
    GLOBAL,
    INCREMENTAL,
    KNOWN,
    OURS,
    OUTSIDE,
    PAPER,
    SARATHI,
    SEPARATE,
    SPECINFER,
    STRATEGIES,
    STTA,
    SYSTEMS,
    TREE_POLICIES,
)
from jaxspec.bench.slo_mix import apportion
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.cost import LLAMA2_A100
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.workload import Lengths, Workload

SEVEN, SEVENTY = "llama-2-7b", "llama-2-70b"


def table(inputs: float, outputs: float, rows: int = 300, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    return Lengths(rng.geometric(1 / inputs, rows), rng.geometric(1 / outputs, rows), np.full(rows, np.nan))


@pytest.fixture(scope="module")
def data() -> Data:
    """Twenty seconds of requests with answers of 70 tokens."""
    trace = arrivals.poisson(3000, 5.0, np.random.default_rng(0))
    short = dict.fromkeys(LLAMA2_A100, capped(table(20, 70), CONTEXT))
    return Data(SYSTEMS, short, capped(table(1500, 200), CONTEXT), trace, 1 / 3)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_have_the_requested_categories():
    short, long = table(20, 60), table(900, 200, seed=1)
    categories = Categories((short, long, short), (0.0125, *TARGETS[SEVEN]))
    rng = np.random.default_rng(0)
    work, kind = categories.workload(arrivals.poisson(400, 5.0, rng), MIX, rng)
    assert [int((kind == k).sum()) for k in range(3)] == [240, 80, 80]
    assert work.tpot is not None
    assert {k: set(work.tpot[kind == k].tolist()) for k in range(3)} == {0: {0.0125}, 1: {0.03}, 2: {0.1}}
    assert set(zip(work.input[kind == 1].tolist(), work.output[kind == 1].tolist(), strict=True)) <= set(
        zip(long.input.tolist(), long.output.tolist(), strict=True)
    )
    assert sum(strict_share(0.2)) == pytest.approx(1.0) and strict_share(1.0) == (1.0, 0.0, 0.0)
    cut = capped(Lengths(np.array([5000, 9, 50]), np.array([100, 9, 4000]), np.full(3, np.nan)), 4096)
    assert (cut.input + cut.output <= 4096).all() and cut.input.tolist() == [3996, 9, 50]


def test_max_tokens_does_not_tell_the_length():
    lengths = capped(table(900, 200), CONTEXT)
    rng = np.random.default_rng(0)
    work, _ = Categories((lengths, lengths, lengths), (1, 1, 1)).workload(arrivals.burst(200), MIX, rng)
    assert work.max_tokens is not None
    assert (work.input + work.max_tokens <= CONTEXT).all() and (work.max_tokens >= work.output).all()
    assert (work.max_tokens > 1.5 * work.output).mean() > 0.9


@pytest.mark.parametrize(("shares", "total"), [(MIX, 10), (MIX, 7), ((0.7, 0.15, 0.15), 33), ((1, 0, 0), 5)])
def test_shares_are_exact_but_for_rounding(shares, total):
    counts = apportion(shares, total)
    assert sum(counts) == total
    assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))


def test_samples_are_stratified_by_length():
    """Even small ones have the table's mean, and as many long requests as it has."""
    lengths = table(2000, 200, rows=3000)
    sums = lengths.input + lengths.output
    plain, drawn = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        plain.append(sums[rng.integers(len(lengths), size=20)].mean())
        drawn.append(sums[stratified(lengths, 20, rng)].mean())
    assert np.std(drawn) < 0.4 * np.std(plain)
    assert np.mean(drawn) == pytest.approx(sums.mean(), rel=0.03)
    assert len(stratified(lengths, 0, np.random.default_rng(0))) == 0


def answers(path: Path, rows: int = 12) -> Path:
    """Answers of 7b of 10, 20, … words with six characters each; those of 13b are twice as long."""
    texts = ["word: " * (10 * (i + 1)) for i in range(rows)]
    lines = [
        {
            "turns": ["Tell me of owls."], "other_references": {"llama-2-7b-chat-hf": text},
            "reference_words": {"llama-2-7b-chat-hf": 10 * (i + 1), "llama-2-13b-chat-hf": 20 * (i + 1)},
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_answers_have_the_models_lengths(tmp_path):
    path = answers(tmp_path / "answers.jsonl", 3)
    assert read_answers(path, "llama-2-7b-chat-hf").output.tolist() == [15, 30, 45]
    larger = read_answers(path, "llama-2-13b-chat-hf")
    assert larger.output.tolist() == [30, 60, 90] and larger.input.tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match=r"line 1: .*llama-3"):
        read_answers(path, "llama-3")


# --- simulations ------------------------------------------------------------------------------------------------------


def attainment(data: Data, names: tuple[str, ...], rate: float, seeds: range = range(2), **more) -> dict[str, float]:
    part = [Case(name, SEVEN, rate, seed, **more) for name in names for seed in seeds]
    found = curves(part, {case: cases.serve(data, case) for case in part}, "rate")
    shares = {name: estimate["attainment"] for name, points in found.items() for estimate in points.values()}
    return {name: share.mean for name, share in shares.items() if share is not None}


def test_the_baseline_latency_is_the_papers():
    assert cases.baseline(LLAMA2_A100[SEVEN]) == pytest.approx(12.5e-3)


def test_requests_are_the_same_for_all_systems_and_differ_by_seed(data):
    case = Case(PAPER, SEVEN, 2.0, 0)
    work, kind = data.workload(case)
    same, _ = data.workload(replace(case, system=SPECINFER))
    other, _ = data.workload(replace(case, seed=1))
    assert (work.arrival == same.arrival).all() and (work.output == same.output).all()
    assert work.arrival.tolist() != other.arrival.tolist()
    stricter, _ = data.workload(replace(case, scale=0.5))
    assert work.tpot is not None and stricter.tpot is not None
    assert stricter.tpot[kind == 0] == pytest.approx(0.5 * work.tpot[kind == 0])


def served(first_token: list[float], finished: list[float], output: list[int], last: float = 20.0) -> Served:
    """Requests with a TPOT SLO of one second; the first arrive at 0, the last one at `last`."""
    n = len(output)
    arrival = np.array([0.0] * (n - 1) + [last])
    work = Workload(arrival, np.ones(n, int), np.array(output), np.full(n, np.nan), np.ones(n))
    none = np.zeros(n, int)
    return Served(work, np.zeros(n), np.array(first_token), np.array(finished), none, none, none, none, 1, 0, 1.0)


def test_answers_of_one_token_do_not_count():
    found = cases.summary([served([1, 1, 1, 20], [1, 5, 20, 20], [1, 5, 11, 1])], [np.array([0, 0, 1, 0])])
    assert (found["attainment"], found["strict"], found["moderate"], found["relaxed"]) == (0.5, 1.0, 0.0, None)
    assert found["goodput"] == pytest.approx(5 / 20) and found["throughput"] == pytest.approx(18 / 20)


def test_tokens_after_the_last_arrival_do_not_count():
    times = np.array([1.0, 1.0, 9.0, 11.0, 4.0]), np.array([11.0, 8.0, 11.0, 20.0, 4.0])
    output = np.array([11, 8, 3, 100, 1])
    assert cases.generated(*times, output, 10.0).tolist() == [10, 8, 2, 0, 1]
    whole, cut = (cases.summary([served([1, 10], [100, 10], [100, 1], last)], [np.zeros(2, int)]) for last in (100, 10))
    assert whole["goodput"] == pytest.approx(1.0) and cut["goodput"] == pytest.approx(1.0)


def test_separate_pipelines_have_a_machine_each_and_their_goodput_is_per_machine():
    halves = [served([1, 20], [5, 20], [5, 1]), served([1, 20], [10, 20], [6, 1])]
    found = cases.summary(halves, [np.array([0, 0]), np.array([1, 1])], machines=2)
    assert found["goodput"] == pytest.approx((5 / 20) / 2) and found["throughput"] == pytest.approx((13 / 20) / 2)
    assert found["attainment"] == 0.5 and found["ttft"] == 0.5


def test_separate_pipelines_relieve_strict_requests_of_long_prompts(data):
    """Thrice the load on three machines: the strict ones' steps are shorter than next to summaries."""
    rate = 0.5
    alone, together = (cases.serve(data, Case(name, SEVEN, rate, 0)) for name in (SEPARATE, SARATHI))
    assert alone["strict"] is not None and together["strict"] is not None
    assert alone["strict"] >= together["strict"]
    assert alone["throughput"] == pytest.approx(together["throughput"], rel=0.4)


@pytest.mark.slow
def test_drafts_meet_slos_that_continuous_batching_misses(data):
    light = attainment(data, (INCREMENTAL, SARATHI, PAPER, OURS), 2.0)
    assert light[PAPER] > 1.3 * max(light[INCREMENTAL], light[SARATHI]) and light[OURS] > 0.85


@pytest.mark.slow
def test_adaserve_meets_more_slos_than_its_baselines_under_load(data):
    found = attainment(data, (*BASELINES, FCFS, STTA, PAPER, OURS), 5.0, range(1))
    assert found[PAPER] > max(found[name] for name in (*BASELINES, FCFS, STTA))
    assert found[OURS] > max(found[name] for name in BASELINES)


@pytest.mark.slow
def test_prompts_within_the_budget_leave_strict_requests_drafts(data):
    found = attainment(data, (PAPER, OUTSIDE), 5.0)
    assert found[PAPER] > found[OUTSIDE]


@pytest.mark.slow
def test_a_better_drafter_meets_stricter_slos(data):
    only_strict = {"shares": (1.0, 0.0, 0.0), "scale": 0.6}
    weak, strong = (attainment(data, (PAPER,), 1.0, first=first, **only_strict) for first in ((0.3, 0.1), (0.66, 0.1)))
    assert strong[PAPER] > weak[PAPER] + 0.2


def test_the_systems_predict_lengths_or_not():
    known = {name: SYSTEMS[name].load() for name in (OURS, BLIND, KNOWN, PAPER)}
    assert known[OURS].predictor == "noisy_oracle" and known[OURS].predictor_noise == 0.49
    assert (known[BLIND].predictor, known[KNOWN].predictor, known[PAPER].predictor) == ("none", "oracle", "none")


def test_selection_takes_little_of_a_step(data, monkeypatch):
    monkeypatch.setattr(cases, "WRITTEN", 16)
    found = cases.breakdown(data, Case(PAPER, SEVEN, 0.0, 0))
    assert 0 < found["selection"] < 100 and found["target"] > found["drafter"] > 0


# --- gains ------------------------------------------------------------------------------------------------------------


def results(values: dict[str, dict[float, float]], ttft: float = 0.1) -> dict[Case, dict[str, float]]:
    """Two seeds; the second one's values are half of the first one's, in all systems."""
    every = {"strict": 1.0, "throughput": 1.0, "accepted": 1.0, "drafted": 1.0}
    return {
        Case(name, SEVEN, rate, seed): {**every, "attainment": x / (1 + seed), "goodput": x / (1 + seed), "ttft": ttft}
        for name, rates in values.items() for rate, x in rates.items() for seed in range(2)
    }  # fmt: skip


def test_gains_are_over_the_best_baseline_at_each_load():
    values = {name: {1.0: 0.5, 2.0: 0.1 * i} for i, name in enumerate(BASELINES)} | {PAPER: {1.0: 0.6, 2.0: 0.3}}
    found = results(values)
    gain = gains(list(found), found, BASELINES)[PAPER]["attainment"]
    assert gain["best"] == pytest.approx((1.5, 1.5, 1.5)) and gain["rate"] == 2.0
    assert gain["mean"].mean == pytest.approx((0.6 / 0.5 + 0.3 / 0.2) / 2) and gain["loads"] == [1.0, 2.0]


def test_gains_do_not_count_loads_at_which_the_first_token_takes_long():
    values = {name: {1.0: 0.5, 2.0: 0.1} for name in BASELINES} | {PAPER: {1.0: 0.6, 2.0: 0.6}}
    found = results(values)
    slow = {**found, **{case: {**one, "ttft": 9.0} for case, one in found.items() if case.rate == 2.0}}
    gain = gains(list(slow), slow, BASELINES)[PAPER]["goodput"]
    assert gain["best"].mean == pytest.approx(1.2) and gain["loads"] == [1.0]
    assert gains(list(slow), slow, BASELINES, inf)[PAPER]["goodput"]["best"].mean == pytest.approx(6.0)
    assert gains(list(slow), slow, BASELINES, 0.0)[PAPER]["goodput"]["best"] is None


def test_gains_need_all_baselines():
    found = results({INCREMENTAL: {1.0: 0.5}, PAPER: {1.0: 0.6}})
    with pytest.raises(ValueError, match=f"{SARATHI}, {SPECINFER}"):
        gains(list(found), found, BASELINES)
    turns = {name: {"attainment": [0.5, 0.4], "goodput": [1.0, 0.0]} for name in (*BASELINES[1:], PAPER)}
    assert adaserve_engine.gains(turns) == {}
    turns[INCREMENTAL] = {"attainment": [0.25, 0.8], "goodput": [0.0, 0.0]}
    gain = adaserve_engine.gains(turns)[PAPER]
    assert gain["attainment"] == pytest.approx((0.75, 0.75 - 0.25 * 12.706, 0.75 + 0.25 * 12.706), abs=1e-3)
    assert gain["goodput"] == (1.0, 1.0, 1.0)


def test_erlang_is_the_number_that_decode_at_once():
    fixed = [Lengths(np.ones(2, int), np.full(2, n), np.full(2, np.nan)) for n in (100, 50, 100)]
    assert adaserve_engine.erlang(2.0, fixed, (0.6, 0.2, 0.2), 0.01) == pytest.approx(2 * 90 * 0.01)


def test_headlines_are_the_papers_numbers():
    gain = {"best": [1.7, 1.6, 1.8], "rate": 2, "mean": [1.5, 1.4, 1.6], "loads": [1, 2]}
    found = {model: {PAPER: dict.fromkeys(("attainment", "goodput"), gain)} for model in report.PAPER_GAINS}
    shares = {x: {"attainment": [mean, mean, mean]} for x, mean in (("0", 1.0), ("0.5", 0.93), ("1", 0.94))}
    trees = {PAPER: {what: {"mean": [0.9, 0.85, 0.95]} for what in ("attainment", "goodput")}}
    simulated = {
        "seeds": 5, "fewer": 3, "gains": found, "stricter": {}, "trees": trees,
        "by_share": {"llama-2-7b": {PAPER: shares}},
    }  # fmt: skip
    lines = report.headlines({"simulated": simulated})
    assert [(line.published, line.verdict) for line in lines[:6]] == [
        (1.63, "met on average"), (1.51, "met"), (1.66, "met on average"),
        *[(paper, "met in part") for paper in (1.73, 1.73, 1.74)],
    ]  # fmt: skip
    assert [line.verdict for line in lines[6:14]] == ["not run"] * 8
    lowest, *others, attainment, goodput = lines[14:]
    assert lowest.simulated == [0.93] * 3 and lowest.verdict == "too few seeds"
    assert {line.verdict for line in others} == {"not run"}
    assert attainment.explained == goodput.explained == "not met; cause not found"
    soon, late = ({"systems": {PAPER: {"ttft": [seconds] * 3}}} for seconds in (0.5, 2.5))
    load = {**soon, "gains": {PAPER: {"attainment": [1.2, 1.1, 1.3]}}}
    more = {**soon, "gains": {PAPER: {"attainment": [1.4, 1.1, 1.7]}}}
    slow = {**late, "gains": {PAPER: {"attainment": [1.9, 1.8, 2.0]}}}  # prompts wait too long
    kept = {"engine": {"loads": {"4": load, "8": more, "9": slow}, "light": {"scale": 0.8, "systems": {}}}}
    assert [line.engine for line in report.headlines(kept)[:3]] == [[1.4, 1.1, 1.7], None, None]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experiments on the tiny model."""
    size = adaserve.QUICK
    small = replace(size, rates=dict.fromkeys(size.rates, (2,)), scales=(0.8, 0.6), alpaca={SEVENTY: (4,)})
    monkeypatch.setattr(adaserve, "QUICK", small)
    monkeypatch.setattr(cases, "WRITTEN", 16)
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


def command(tmp_path: Path) -> list[str]:
    times = np.cumsum(np.random.default_rng(0).exponential(0.2, 3000))
    (tmp_path / "trace.csv").write_text("arrival_s\n" + "".join(f"{t:.4f}\n" for t in times))
    answers(tmp_path / "answers.jsonl", 5)
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n1500,90\n2500,200\n")
    files = [
        ("trace", "trace.csv"),
        ("answers", "answers.jsonl"),
        ("alpaca", "prompts.jsonl"),
        ("arxiv", "lengths.csv"),
    ]
    given = [part for name, file in files for part in (f"--{name}", str(tmp_path / file))]
    keep = ["--keep", str(tmp_path / "keep"), "--processes", "1"]
    return ["paper", "adaserve", *given, *keep, "--out", str(tmp_path / "docs")]


@pytest.mark.slow
def test_the_page_is_written(quick, tmp_path):
    out = tmp_path / "docs"
    own = ["--system", "own=global_greedy", "--predictor", "noisy:0.1", "--arrivals", str(tmp_path / "trace.csv")]
    assert main([*command(tmp_path), "--quick", "--minutes", "0.05", *own]) == 0
    text = (out / "adaserve.md").read_text()
    for expected in (
        "AdaServe, Llama-2-7b: SLO attainment (Fig. 4) relative to the best baseline, up to | 1.63×",
        "at 0.8 × the baseline latency (Fig. 10, to which the drafter is fitted) | 95.0 %", "selection's share",
        "Fig. 8", "drafter with 0.66", "own",
    ):  # fmt: skip
        assert expected in text
    names = ("attainment", "goodput", "ttft", "ablation", "strict", "stricter")
    assert {f.name for f in out.glob("*.png")} == {f"adaserve_{name}.png" for name in names}
    kept = json.loads((out / "adaserve.json").read_text())["simulated"]
    assert set(kept["by_rate"][SEVENTY]) == {*BASELINES, *STRATEGIES, PAPER, OURS, "own"}
    assert set(kept["by_rate"][SEVEN]) == {*BASELINES, *TREE_POLICIES, PAPER, OURS, "own"}
    assert {EQUAL, GLOBAL} <= set(kept["gains"][SEVEN])


@pytest.mark.slow
def test_the_engine_fills_its_columns(quick, tmp_path):
    settings = [part for setting in SMALL for part in ("--set", setting)]
    names = (*BASELINES, PAPER, OURS)
    (tmp_path / "owls.jsonl").write_text('{"turns": ["Owls?"]}\n{"turns": ["Owls at night?"]}\n')
    work = ["--engine", "--engine-jobs", "6", "--engine-long", "0.01", "--repeats", "2", "--set", "draft=[ngram]"]
    more = ["--prompts", str(tmp_path / "owls.jsonl"), "--engine-systems", *names, "--engine-light", "1"]
    assert main([*command(tmp_path), *work, *more, *settings]) == 0
    kept = json.loads((tmp_path / "docs" / "adaserve.json").read_text())
    assert set(kept) == {"engine"} and len(kept["engine"]["loads"]) == 2 and not kept["engine"]["missing"]
    for found in (*kept["engine"]["loads"].values(), kept["engine"]["light"]):
        assert {name: len(metrics["goodput"]) for name, metrics in found["systems"].items()} == dict.fromkeys(names, 3)
    text = (tmp_path / "docs" / "adaserve.md").read_text()
    assert "2 turns of 6 requests" in text and "Not run" not in text
    assert main([*command(tmp_path), "--engine", "--engine-systems", "nobody", *settings]) == 2


def test_unreadable_data_is_named(tmp_path, capsys):
    files = ["--trace", "none.csv", "--answers", "none.jsonl", "--alpaca", "none.jsonl", "--arxiv", "none.csv"]
    assert main(["paper", "adaserve", *files, "--out", str(tmp_path), "--engine"]) == 2
    assert "none." in capsys.readouterr().err
