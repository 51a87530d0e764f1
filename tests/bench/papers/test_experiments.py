"""What the papers' experiments share: kept runs, intervals, knees, headlines, and a user's own systems."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.bench import BenchError
from jaxspec.bench.estimates import Estimate, estimate, interval, knee, ratio, reduction
from jaxspec.bench.papers.headlines import Headline, index, lines, table
from jaxspec.bench.papers.presets import Preset
from jaxspec.bench.papers.runs import Runs
from jaxspec.bench.papers.variants import Variants
from jaxspec.bench.table import PERCENT, TIMES, share, shown
from jaxspec.sched.sim import arrivals


@dataclass(frozen=True)
class Square:
    """A task whose file shows how often it ran."""

    number: int
    folder: str


def squared(factor: int, task: Square) -> dict[str, float]:
    with (Path(task.folder) / "ran").open("a") as file:
        file.write(f"{task.number}\n")
    if task.number < 0:
        raise ValueError("negative")
    return {"square": factor * task.number**2}


def ran(folder: Path) -> list[int]:
    return sorted(map(int, (folder / "ran").read_text().split()))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stopped_experiment_goes_on_where_it_stopped(tmp_path, processes):
    tasks = [Square(n, str(tmp_path)) for n in (3, 1, 2)]
    with pytest.raises(ValueError, match="negative"):
        Runs(tmp_path / "kept.jsonl", 1).results("tasks", squared, 1, [*tasks[:2], Square(-1, str(tmp_path))])
    found = Runs(tmp_path / "kept.jsonl", processes).results("tasks", squared, 1, tasks)
    assert {task.number: result["square"] for task, result in found.items()} == {3: 9, 1: 1, 2: 4}
    assert ran(tmp_path) == [-1, 1, 2, 3]  # each once
    # Other data is another experiment.
    other = Runs(tmp_path / "kept.jsonl", processes).results("tasks", squared, 2, tasks)
    assert [result["square"] for result in other.values()] == [18, 2, 8]
    assert len(ran(tmp_path)) == 7


def test_results_of_other_sources_and_half_written_lines_are_not_used(tmp_path, monkeypatch):
    task = Square(3, str(tmp_path))
    Runs(tmp_path / "kept.jsonl").results("tasks", squared, 1, [task])
    with (tmp_path / "kept.jsonl").open("a") as file:
        file.write('["cut off')
    assert Runs(tmp_path / "kept.jsonl").results("tasks", squared, 1, [task])[task] == {"square": 9}
    assert ran(tmp_path) == [3]
    monkeypatch.setattr("jaxspec.bench.papers.runs._source_files", lambda: [])
    Runs(tmp_path / "kept.jsonl").results("tasks", squared, 1, [task])
    assert ran(tmp_path) == [3, 3]


def test_intervals_are_students():
    found = estimate([1.0, 2.0, 3.0, nan, None])
    assert found is not None
    # t(0.975, 2) = 4.3027; the standard error is 1 / √3.
    assert found == pytest.approx((2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-3)
    assert estimate([5.0]) == (5.0, 5.0, 5.0) and estimate([nan]) is None
    assert ratio([2.0, 4.0], [1.0, 2.0]) == (2.0, 2.0, 2.0)
    assert reduction([1.0, 2.0], [2.0, 4.0]) == (50.0, 50.0, 50.0)


def test_an_interval_contains_the_mean_95_times_of_100():
    rng = np.random.default_rng(0)
    found = [estimate(rng.normal(3.0, 2.0, 6).tolist()) for _ in range(2000)]
    inside = np.mean([e is not None and e.low <= 3.0 <= e.high for e in found])
    assert 0.93 < inside < 0.97


def test_intervals_in_tables():
    form = interval("{:.1f} %")
    assert shown(Estimate(12.34, 10.0, 14.0), form) == "12.3 % (10.0 … 14.0)"
    assert shown(Estimate(5.0, 5.0, 5.0), form) == "5.0 %" and shown(None, form) == "–"


def test_intervals_do_not_go_beyond_what_can_be():
    assert shown(Estimate(0.97, 0.9, 1.04), interval(share)) == "97.0 % (90.0 … 100.0)"
    assert shown(Estimate(0.02, -0.01, 0.05), interval(share)) == "2.0 % (0.0 … 5.0)"
    assert shown(Estimate(13.0, -138.9, 164.8), interval(PERCENT, least=0.0)) == "13.0 % (0.0 … 164.8)"
    assert shown(Estimate(2.0, -1.0, 5.0), interval(TIMES)) == "2.00× (0.00 … 5.00)"
    assert shown(Estimate(-1.0, -2.0, 0.0), interval(PERCENT)) == "-1.0 % (-2.0 … 0.0)"


@given(limit=st.floats(0.01, 1e4), start=st.floats(0.01, 1e3), power=st.floats(0.3, 3))
def test_a_knee_lies_at_the_limit(limit, start, power):
    found = knee(lambda load: load**power, limit, start, tolerance=0.05, most=80)
    assert found**power <= limit * (1 + 1e-9) and (1.06 * found) ** power > limit


def test_a_knee_without_an_end_is_bounded():
    assert knee(lambda _: inf, 1.0, 1.0) == 0.0
    assert knee(lambda _: 0.0, 1.0, 1.0, most=5) == 16.0  # the largest load that was tried


def test_verdicts():
    found = [Estimate(mean, mean - 0.2, mean + 0.2) for mean in (2.1, 1.9, 1.7, 1.5)]
    all_ = [Headline("speed", 1.8, e, because="its trees were smaller", seeds=5) for e in (*found, None)]
    assert [h.verdict for h in all_] == ["met", "met on average", "met in part", "not met", "not run"]
    assert [h.explained for h in all_[:2]] == ["met", "met on average"]
    assert all_[3].explained == "not met, because its trees were smaller"
    assert replace(all_[3], because="").explained == "not met; cause not found"
    error = Headline("error", 10.0, (9.0, 8.5, 9.5), form="{:.1f} %", at_most=True, seeds=5)
    assert error.verdict == "met"
    assert replace(error, published=9.2).verdict == "met on average"
    assert Headline("error", 9.0, (10.0, 8.5, 11.5), at_most=True, seeds=5).verdict == "met in part"
    assert "| speed | 1.80× | 1.50× (1.30 … 1.70) | – | not met, because" in table(all_)
    assert lines(all_[3:]) == [
        "not met         speed: paper 1.80×, simulated 1.50× (1.30 … 1.70)", "not run         speed: paper 1.80×",
    ]  # fmt: skip
    assert "| [P](p.md) | error | 10.0 % | 9.0 % (8.5 … 9.5) | – | met | `c` |" in index(
        [("[P](p.md)", "`c`", [error])]
    )


def test_a_headline_that_costs_another_one_is_met_in_part():
    late = Headline("error", 10.0, (9.0, 8.5, 9.5), because="bias", only="few see it", at_most=True, seeds=5)
    assert late.verdict == "met in part" and late.explained == "met in part, because few see it"
    assert replace(late, published=5.0).explained == "not met, because bias"


@pytest.mark.parametrize("seeds", [None, 1, 4])
def test_few_seeds_give_no_verdict(seeds):
    for simulated in ((9.0, 8.9, 9.1), (1.0, -20.0, 22.0)):
        assert Headline("speed", 1.8, simulated, seeds=seeds).explained == "too few seeds"
    assert Headline("speed", 1.8, None, seeds=seeds).verdict == "not run"


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"system": [], "predictor": None, "arrivals": None, **given})


def test_own_systems_and_predictors():
    variants = Variants.of(options(system=["mine=las,aging_ms=50"], predictor="noisy:0.25"))
    changed = variants.apply({"known": Preset("sjf_oracle"), "plain": Preset("fcfs")})
    assert list(changed) == ["known", "plain", "mine"]
    known = changed["known"].load()
    assert (known.predictor, known.predictor_noise) == ("noisy_oracle", 0.25)
    assert changed["plain"].load().predictor == "none" and changed["mine"].load().aging_ms == 50
    assert not Variants.of(options()) and variants


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"system": ["las"]}, "NAME=PRESET"), ({"system": ["a=no_such_preset"]}, "--system a: .*missing"),
        ({"system": ["a=las,nonsense=1"]}, "--system a: .*nonsense"), ({"predictor": "noisy"}, "noisy:SIGMA"),
        ({"predictor": "noisy:-1"}, "noisy:SIGMA"), ({"predictor": "psychic"}, "oracle or noisy:SIGMA"),
    ],
)  # fmt: skip
def test_wrong_variants_are_named(given, message):
    with pytest.raises(BenchError, match=message):
        Variants.of(options(**given))


def test_arrivals_of_a_trace_start_anywhere_and_have_the_rate(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s\n" + "\n".join(str(t**2) for t in range(10)) + "\n")
    variants = Variants(trace=str(path))
    first, second = (variants.arrivals(25, 4.0, np.random.default_rng(seed)) for seed in (0, 1))
    for one in (first, second):
        times = [a.time for a in one]
        assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(24 / 4.0)
    assert [a.time for a in first] != [a.time for a in second]
    with pytest.raises(ValueError, match="two arrivals"):
        arrivals.part([], 3, 1.0, np.random.default_rng(0))
