"""`jaxspec.bench paper adaserve`: what is compared, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.adaserve import engine as adaserve_engine
from jaxspec.bench.papers.adaserve import experiment as adaserve
from jaxspec.bench.papers.adaserve.report import best_gain, engine_gain, ratios, shown
from jaxspec.bench.papers.adaserve.systems import (
    BASELINES,
    EQUAL,
    FCFS,
    GLOBAL,
    INCREMENTAL,
    MIX,
    OURS,
    PAPER,
    SARATHI,
    SPECINFER,
    STTA,
    SYSTEMS,
    TARGETS,
    UNCALIBRATED,
    Categories,
    capped,
    strict_share,
)
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.workload import Lengths


def table(inputs: float, outputs: float, rows: int = 300, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    return Lengths(rng.geometric(1 / inputs, rows), rng.geometric(1 / outputs, rows), np.full(rows, np.nan))


def setting(path: Path, minutes: float = 0.7) -> adaserve.Setting:
    times = np.cumsum(np.random.default_rng(0).exponential(0.2, 3000))
    path.write_text("arrival_s\n" + "".join(f"{t:.4f}\n" for t in times))
    short, long = capped(table(20, 70), 4096), capped(table(1500, 200), 4096)
    return adaserve.Setting("llama-2-7b", short, long, str(path), minutes, [0])


def test_requests_have_the_requested_categories():
    short, long = table(20, 60), table(900, 200, seed=1)
    categories = Categories((short, long, short), (0.0125, *TARGETS["llama-2-7b"]))
    rng = np.random.default_rng(0)
    work, kind = categories.workload(arrivals.poisson(4000, 5.0, rng), MIX, rng)
    assert [float((kind == k).mean()) for k in range(3)] == pytest.approx(MIX, abs=0.03)
    assert work.tpot is not None
    assert {k: set(work.tpot[kind == k].tolist()) for k in range(3)} == {0: {0.0125}, 1: {0.03}, 2: {0.1}}
    assert set(zip(work.input[kind == 1].tolist(), work.output[kind == 1].tolist(), strict=True)) <= set(
        zip(long.input.tolist(), long.output.tolist(), strict=True)
    )
    assert sum(strict_share(0.2)) == pytest.approx(1.0) and strict_share(1.0) == (1.0, 0.0, 0.0)
    cut = capped(Lengths(np.array([5000, 9, 50]), np.array([100, 9, 4000]), np.full(3, np.nan)), 4096)
    assert (cut.input + cut.output <= 4096).all() and cut.input.tolist() == [3996, 9, 50]


@pytest.mark.slow
def test_drafts_meet_slos_that_continuous_batching_misses(tmp_path):
    """Light load, and one at which SLOs have to decide: what the paper says, and more by ours."""
    own = setting(tmp_path / "t.csv")
    assert own.baseline == pytest.approx(12.5e-3)
    light = {name: own.point(name, 2.0)["attainment"] for name in (INCREMENTAL, SARATHI, PAPER, OURS)}
    assert light[PAPER] > 1.3 * max(light[INCREMENTAL], light[SARATHI]) and light[OURS] > 0.85
    # At a lighter load, all systems whose prompts stay within the verify budget meet nearly all SLOs.
    heavy = {name: own.point(name, 11.0)["attainment"] for name in (SPECINFER, EQUAL, GLOBAL, FCFS, STTA, OURS)}
    assert heavy[OURS] == max(heavy.values())


@pytest.mark.slow
def test_adaserve_meets_more_slos_than_its_selection_without_them(tmp_path):
    own = setting(tmp_path / "t.csv", minutes=1.0)
    rate, mix = 5.0, (0.4, 0.2, 0.4)
    found = {name: own.point(name, rate, mix) for name in (GLOBAL, PAPER, UNCALIBRATED)}
    assert found[PAPER]["attainment"] >= found[GLOBAL]["attainment"] - 0.01
    # The same requests and the same truth: light loads give the same throughput.
    assert found[PAPER]["throughput"] == pytest.approx(found[GLOBAL]["throughput"], rel=0.05)


def test_gains_are_over_the_best_of_the_others():
    points = {name: {"1": {"x": 0.5}, "2": {"x": 0.1 * i}} for i, name in enumerate((*BASELINES, PAPER))}
    assert best_gain(points, PAPER, "x") == (pytest.approx(1.5), "2")
    assert shown(best_gain(points, PAPER, "x")) == "1.50× (2/s)" and shown(None) == "–"
    systems = {INCREMENTAL: {"x": [1.0, 0.0]}, SARATHI: {"x": [0.5, 0.0]}, OURS: {"x": [2.0, 3.0]}}
    assert ratios(systems, OURS, "x", BASELINES) == [2.0] and ratios(systems, PAPER, "x", [SARATHI]) == []
    assert (
        engine_gain({"rates": {"1": systems}}, OURS, "x") == "2.00× (2.00 … 2.00)"
        and engine_gain(None, OURS, "x") == "–"
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experiments on the tiny model."""
    monkeypatch.setattr(adaserve, "RATES", {"llama-2-7b": (2, 8), "llama-2-70b": (1,)})
    monkeypatch.setattr(adaserve, "SHARES", (0.0, 1.0))
    monkeypatch.setattr(adaserve, "SCALES", (1.0, 0.8, 0.6))
    monkeypatch.setattr(adaserve, "WRITTEN", 16)
    monkeypatch.setattr(adaserve_engine, "TRIES", 3)
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


def command(tmp_path: Path) -> list[str]:
    setting(tmp_path / "trace.csv")
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n1500,90\n2500,200\n")
    files = [("trace", "trace.csv"), ("alpaca", "prompts.jsonl"), ("arxiv", "lengths.csv")]
    given = [part for name, file in files for part in (f"--{name}", str(tmp_path / file))]
    return ["paper", "adaserve", *given, "--out", str(tmp_path / "docs")]


@pytest.mark.slow
def test_the_page_is_written(quick, tmp_path):
    out = tmp_path / "docs"
    assert main([*command(tmp_path), "--minutes", "0.1"]) == 0
    text = (out / "adaserve.md").read_text()
    for expected in ("(Fig. 4), Llama-2-7b | 1.63×", "0.8 × baseline latency (Fig. 10) | 95.0 %", "selection's share"):
        assert expected in text
    names = ("attainment", "goodput", "ablation", "strict", "stricter")
    assert {f.name for f in out.glob("*.png")} == {f"adaserve_{name}.png" for name in names}
    kept = json.loads((out / "adaserve.json").read_text())["simulated"]
    assert set(kept["by_rate"]["llama-2-7b"]) == set(SYSTEMS)
    assert 0 < kept["breakdown"][OURS]["selection"] < 100


@pytest.mark.slow
def test_the_engine_fills_its_columns(quick, tmp_path):
    settings = [part for setting in SMALL for part in ("--set", setting)]
    names = (INCREMENTAL, SARATHI, SPECINFER, PAPER, OURS)
    (tmp_path / "owls.jsonl").write_text('{"turns": ["Owls?"]}\n{"turns": ["Owls at night?"]}\n')
    work = ["--engine", "--engine-jobs", "6", "--engine-long", "0.01", "--repeats", "2", "--set", "draft=[ngram]"]
    more = ["--prompts", str(tmp_path / "owls.jsonl"), "--engine-systems", *names]
    assert main([*command(tmp_path), *work, *more, *settings]) == 0
    kept = json.loads((tmp_path / "docs" / "adaserve.json").read_text())
    assert set(kept) == {"engine"} and 1 <= len(kept["engine"]["search"]) <= 3
    for systems in (*kept["engine"]["rates"].values(), kept["engine"]["light"]["systems"]):
        assert {name: len(found["goodput"]) for name, found in systems.items()} == dict.fromkeys(names, 2)
    text = (tmp_path / "docs" / "adaserve.md").read_text()
    assert "…" in next(line for line in text.splitlines() if line.startswith("| SLO attainment at 0.8"))
    assert main([*command(tmp_path), "--engine", "--engine-systems", "nobody", *settings]) == 2


def test_unreadable_data_is_named(tmp_path, capsys):
    files = ["--trace", "none.csv", "--alpaca", "none.jsonl", "--arxiv", "none.csv"]
    assert main(["paper", "adaserve", *files, "--out", str(tmp_path), "--engine"]) == 2
    assert "none." in capsys.readouterr().err
