"""`jaxspec.bench paper laps_sd`: what is compared, and the page that is made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.laps_sd import cases, engine, experiment, grids, perception, report
from jaxspec.bench.papers.laps_sd.cases import CHAT, Case, Data, Knee
from jaxspec.bench.papers.laps_sd.perception import Estimation
from jaxspec.bench.papers.laps_sd.report import FCFS, KNOWN, LAPS_SD, LAS, LATE, LP_SJF, TYPICAL
from jaxspec.bench.papers.laps_sd.summaries import best_queues, overall, summary
from jaxspec.bench.papers.laps_sd.systems import BLIND, SYSTEMS
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.variants import Variants
from jaxspec.outputs import RequestMetrics
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.workload import Lengths

#: Grids and estimates so small that the experiment takes seconds.
GRIDS = {
    "COUNTS": (4, 6), "QUEUES": (2, 4), "ARRIVALS": (None, 1.5), "SIGMAS": (0.5,), "SPREADS": (0.1, 0.2),
    "LOADS": (0.9,), "MEANS": (0.5,), "LONGEST_CHAINS": (4,), "QUANTA": (80.0,), "SWITCHED": (20, 500), "SIZES": (8,),
    "CROWDS": (5,), "REQUESTS": 6, "ALTERNATING": 3,
}  # fmt: skip
ESTIMATES = {"ALONE": 12, "MANY": 8, "SETTLING": 4}


def lengths(rows: int = 400) -> Lengths:
    """Answers of 1 to 500 tokens; every prediction is 40 tokens."""
    output = np.random.default_rng(0).geometric(1 / 150, rows).clip(1, 500)
    return Lengths(np.full(rows, 8), output, np.full(rows, 40.0))


def equal(tokens: int, rows: int = 5) -> Lengths:
    return Lengths(np.full(rows, 8), np.full(rows, tokens), np.full(rows, np.nan))


DATA = Data(SYSTEMS, {"chat": lengths(), "100": equal(100), "400": equal(400), "2000": equal(2000)})


def run(systems: Sequence[str], data: Data = DATA, seeds: int = 4, **settings: Any) -> dict[str, Any]:
    part = cases.cases(systems, range(seeds), "chat", BLIND, **{"count": 20, **settings})
    return summary(part, {case: cases.serve(data, case) for case in part})


# --- cases ------------------------------------------------------------------------------------------------------------


def test_orders_differ_as_the_paper_says_they_should():
    found = run((FCFS, LP_SJF, LAS, LAPS_SD, KNOWN), sigma=0.0)
    latency = {system: own["jct"].mean for system, own in found.items()}
    assert latency[KNOWN] < latency[LAPS_SD] < latency[LAS]
    # An order that knows lengths is not worse than attained service, which switches all the time.
    assert latency[LP_SJF] < latency[LAS]
    assert 25 < found[LAPS_SD][LAS]["jct"].mean < 60
    assert found[LAS]["switching"].mean > 2 > found[LAPS_SD]["switching"].mean > found[LP_SJF]["switching"].mean == 0
    assert found[LAPS_SD][LP_SJF]["throughput"].mean == pytest.approx(1, abs=0.02)


def test_laps_sd_gains_where_acceptance_differs_between_requests():
    spreads = [run((LP_SJF, LAPS_SD), load=1.5, process=replace(CHAT, spread=s)) for s in (0.0, 0.4)]
    alike, different = (found[LAPS_SD][LP_SJF]["jct"].mean for found in spreads)
    assert alike < 8 and different > alike + 10


def test_all_systems_get_the_same_requests_and_errors():
    """Wrong lengths cost both orders that see them, and do not change those that do not."""
    served = [
        [cases.serve(DATA, Case(system, "chat", 3, 20, sigma=sigma))["jct"] for system in (LP_SJF, LAPS_SD, LAS)]
        for sigma in (0.0, 2.0)
    ]
    assert served[0][0] < served[1][0] and served[0][1] < served[1][1] and served[0][2] == served[1][2]
    works = [cases.requests(DATA, Case(system, "chat", 3, 20, load=0.8))[0] for system in (LP_SJF, LAS)]
    assert all((getattr(works[0], name) == getattr(works[1], name)).all() for name in ("arrival", "output"))
    assert [case.sigma for case in cases.cases((LP_SJF, LAS), [0], "chat", BLIND, count=2, sigma=1.0)] == [1.0, 0.0]


def test_predictions_are_the_tables_or_the_predictors():
    table = Case(LP_SJF, "chat", 0, 12, sigma=None, cap=30)
    work, _ = cases.requests(DATA, table)
    assert set(work.predicted.tolist()) == {30.0} and work.output.max() <= 30  # no prediction is above the cap
    assert cases.policy(DATA, table).predictor == "none"
    noisy = cases.policy(DATA, replace(table, sigma=0.3, seed=7))
    assert (noisy.predictor, noisy.predictor_noise, noisy.policy_seed) == ("noisy_oracle", 0.3, 7)
    assert np.isnan(cases.requests(DATA, replace(table, sigma=0.3))[0].predicted).all()
    own = Variants(predictor={"predictor": "oracle"})
    data = replace(DATA, systems=own.apply(SYSTEMS), variants=own)
    assert cases.policy(data, table).predictor == "oracle"
    assert np.isnan(cases.requests(data, table)[0].predicted).all()


def test_the_load_is_relative_to_the_capacity():
    case = Case(FCFS, "chat", 1, 200, load=0.5)
    work, sampled = cases.requests(DATA, case)
    times = cases.execution_times(case, work, sampled)
    assert 199 * times.mean() / work.arrival[-1] == pytest.approx(0.5, rel=0.2)
    # Eq. 6 is about what serving takes, so all at once is all of that.
    burst = cases.serve(DATA, replace(case, load=None))
    assert 200 / burst["throughput"] == pytest.approx(times.sum(), rel=0.25)


def test_a_knee_is_the_load_that_the_limit_allows():
    task = Knee(Case(FCFS, "chat", 0, 40), 4.0)
    load = cases.find_knee(DATA, task)["load"]

    def latency(load: float) -> float:
        case = replace(task.case, load=load)
        return cases.serve(DATA, case)["jct"] / cases.execution_times(case, *cases.requests(DATA, case)).mean()

    assert latency(load) <= 4 < latency(1.1 * load)


def test_own_systems_are_compared_too():
    data = replace(DATA, systems={**SYSTEMS, "mine": Preset("laps_sd").but(laps_sd={"window": 4})})
    assert ("mine" in run((LP_SJF, "mine"), data)) and cases.policy(data, Case("mine", "chat", 0, 5)).order == "laps_sd"


# --- figures 2, 3, 6 and 7 --------------------------------------------------------------------------------------------


def test_switches_take_the_share_of_figure_2():
    """§3: switching a request with an output length of 500 tokens adds 14.21 %."""
    parts = grids.switching([0], quick=False)
    data = replace(DATA, tables={f"{n} tokens": equal(n) for n in grids.SWITCHED})
    shares = {name: cases.serve(data, part[0])["switching"] for name, part in parts.items()}
    own = [shares[f"{cases.QUANTUM_MS:g} | {n}"] for n in grids.SWITCHED]
    assert own == sorted(own) and own[-1] == pytest.approx(0.1421, abs=0.01)
    assert shares["20 | 500"] > shares["80 | 500"] > shares["320 | 500"]
    assert cases.serve(data, replace(parts["80 | 500"][0], swap=False))["switching"] == 0


def test_acceptance_rates_vary_early_and_settle():
    """Fig. 3: after about 150 tokens the rate so far hardly changes any more."""
    curve = perception.rate_curve(Sampled(CHAT, 3, np.random.default_rng(0)), 1, 300)
    assert len(curve) > 10 and list(curve) == sorted(curve) and 0 < min(curve.values()) <= max(curve.values()) <= 1
    distance = perception.settling(CHAT, 200, (20, 150, 300), 0)
    assert distance["20"] > 0.15 > 0.06 > distance["150"] > distance["300"]


def estimates(data: str = "chat", sigma: float = 0.0, process: Process = CHAT, **laps: Any) -> dict[str, Any]:
    task = Estimation(Case(LAPS_SD, data, 0, 300, sigma=sigma, process=process, laps=tuple(laps.items())))
    return perception.estimation(DATA, task)


def test_late_stability_estimates_better():
    early, late = (estimates(window=window, tolerance=delta) for window, delta in (report.STABILITY[0], (15, 0.015)))
    assert late["error"] < 10 < 20 < early["error"]
    assert late["stable_after"] > early["stable_after"]
    assert late["perceived"] < early["perceived"] <= 1
    assert set(early["by_length"]) == {"1 to 100", "100 to 200", "200 to 300", "300 to 500"}


def test_shrinkage_and_known_lengths_estimate_better():
    published, shrunk, predicted = estimates(), estimates(shrinkage=True), estimates(sigma=0.5)
    assert shrunk["error"] < 0.8 * published["error"] < published["error"] < predicted["error"]
    assert abs(shrunk["bias"]) < abs(published["bias"])


def test_execution_times_of_steady_requests_are_estimated_well():
    # Equal lengths and nothing that wanders: what is left is the chance of the draw.
    assert estimates("2000", process=Process(0.7), window=10, tolerance=0.02)["error"] < 12


def test_the_best_number_of_queues():
    part = {
        f"chat | 10 | {k}": [Case(LATE, "chat", seed, 10, laps=(("queues", k),)) for seed in range(3)]
        for k in (2, 4, 6)
    }
    latency = {2: 4.0, 4: 3.0, 6: 3.5}
    found = {case: {"jct": latency[dict(case.laps)["queues"]]} for cases_ in part.values() for case in cases_}
    best = best_queues(part, found)["chat | 10"]
    assert best["best"] == "4" and best["latency"]["6"].mean == 3.5
    assert (best["fewest"].mean, best["most"].mean) == (pytest.approx(25), pytest.approx(100 / 7, rel=1e-3))


def test_the_range_of_service_stays_when_queues_are_added():
    for name, part in grids.queues([0], quick=False).items():
        settings = dict(part[0].laps)
        kind = name.split(" | ")[0]
        assert settings["first_threshold_ms"] * 2 ** (settings["queues"] - 2) == pytest.approx(grids.RANGE_MS[kind])


# --- estimates and headlines ------------------------------------------------------------------------------------------


def test_the_abstracts_39_per_cent():
    """LP-SJF 1.47 times slower and 31 % below LAS: (47 + 31) / 2."""
    part = cases.cases((LP_SJF, LAS, LAPS_SD), [0, 1], "chat", BLIND, count=2)
    jct = {LP_SJF: 1.47, LAS: 1 / 0.69, LAPS_SD: 1.0}
    own = overall([part], {case: {"jct": jct[case.system]} for case in part})[LAPS_SD]
    assert own["both"].mean == pytest.approx(report.PAPER_BOTH) and own["slower"].mean == pytest.approx(47)
    assert own[LP_SJF].mean == pytest.approx(report.PAPER_LP_SJF, rel=1e-4) and own[LAS].mean == pytest.approx(31)


def test_the_best_measured_point_reaches_both_goals():
    def point(lp: float, las: float) -> dict[str, Any]:
        return {LAPS_SD: {base: {"jct": [x, x - 1, x + 1]} for base, x in ((LP_SJF, lp), (LAS, las))}}

    kept = {"simulated": {"fewer": 10, "measured": {
        "a | EOS | None": point(60, 10), "b | 256 | 1.5": point(31, 26), "c | 256 | 1.5": point(29, 50),
    }}}  # fmt: skip
    found = report.best(kept)
    assert found is not None and found[0] == " (best of 3 cells: b, answers of at most 256 tokens, Poisson, load 1.5)"
    lines = [h for h in report.headlines(kept) if "measured acceptance" in h.what]
    assert [h.verdict for h in lines] == ["met in part", "not met"]  # 32.0 is within 31 ± 1; 31 is above 26 ± 1


def test_early_estimates_that_few_requests_live_to_see_are_no_success():
    gammas = {report.estimation_key("code", *pair): error for pair, error in (
        (report.STABILITY[0], {"error": [36.3, 34.5, 38.0], "perceived": [0.8, 0.8, 0.8]}),
        (report.STABILITY[-1], {"error": [6.3, 5.0, 7.6], "perceived": [0.007, 0.004, 0.011]}),
    )}  # fmt: skip
    line = next(h for h in report.headlines({"simulated": {"fewer": 10, "errors": gammas}}) if "MBPP" in h.what)
    assert line.verdict == "met in part"
    assert "0.7 % of the requests become stable" in line.explained and "the error is 36.3 %" in line.explained


def test_quick_runs_are_a_part():
    assert grids.thin((1, 2, 3, 4, 5), quick=True) == (1, 3, 5) and grids.thin((1, 2), quick=True) == (1, 2)
    for part in (grids.map_of, grids.variations, grids.measured, grids.queues, grids.switching):
        assert set(part([0], True)) < set(part([0], False))


def test_engine_results_are_estimates_over_the_turns():
    def metrics(seconds: float) -> RequestMetrics:
        return RequestMetrics(arrival=0.0, first_token=seconds / 2, finished=seconds)

    measured = {FCFS: [[metrics(4.0)], [metrics(6.0)]], LP_SJF: [[metrics(2.0)], [metrics(3.0)]]}
    found = engine.compared(measured)
    assert found[LP_SJF][FCFS]["jct"].mean == 50 and found[LP_SJF][FCFS]["ttft"].mean == 0.5
    assert found[FCFS]["jct"].mean == 5 and LAS not in found[FCFS]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulated_and_then_on_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module, values in ((grids, GRIDS), (experiment, ESTIMATES)):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))
    prompts = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "answers.csv").write_text(
        "output_tokens,pred_class5\n" + "\n".join(f"{9 * i},{i % 3}" for i in range(1, 9))
    )
    files = [part for name in ("chat", "code", "math") for part in (f"--{name}", str(tmp_path / "prompts.jsonl"))]
    files += ["--answers", str(tmp_path / "answers.csv"), "--processes", "1", "--keep", str(tmp_path / "keep")]
    out = tmp_path / "docs"
    common = ["paper", "laps_sd", *files, "--out", str(out), "--json", str(tmp_path / "all.json")]
    assert main([*common, "--seeds", "2", "--system", "own=lp_sjf,aging_ms=900", "--predictor", "noisy:0.1"]) == 0
    text = (out / "laps_sd.md").read_text()
    for expected in (
        "mean over all, against LAS | 31.0 %",
        "| 2 | 4 | best |",
        "Poisson, load 1.5",
        "| own |",
        "14.2 %",
        "Seeds: 2 for Fig. 5",
    ):
        assert expected in text
    assert {f.name for f in out.glob("*.png")} == {
        f"laps_sd_{name}.png" for name in ("latency", "queues", "switching", "settling", "map_lp_sjf", "map_las")
    }
    settings = [part for setting in SMALL if "seqs" not in setting for part in ("--set", setting)]
    few = ["--repeats", "2", "--engine-jobs", "6", "--engine-each", "2", "--engine-tokens", "12"]
    assert main([*common, "--engine", *few, *settings]) == 0
    kept = json.loads((tmp_path / "all.json").read_text())
    assert set(kept) == {"simulated", "engine"}
    assert len(kept["engine"]["systems"]["code"][LAPS_SD][LAS]["jct"]) == 3
    assert f"all three kinds, mixed, 6 requests | {TYPICAL}" in (out / "laps_sd.md").read_text()
