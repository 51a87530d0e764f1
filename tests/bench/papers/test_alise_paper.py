"""`jaxspec.bench paper alise`: what is compared, and the page that is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.alise import cases, runtime
from jaxspec.bench.papers.alise import experiment as alise
from jaxspec.bench.papers.alise.cases import Case, Data, Knee
from jaxspec.bench.papers.alise.report import (
    AGAIN,
    ALISE,
    AUTO,
    DEFER,
    FULL,
    KNOWN,
    ORCA,
    SWAP,
    SWAP_KNOWN,
    UNREAD,
    VLLM,
)
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.workload import Lengths

#: So few places that searches for a knee end at few requests.
EXPERIMENT = {
    "FEWER": {"alpaca": 0.03, "sharegpt": 0.03}, "LIMIT": 0.045, "LOADS": (0.5, 1.0, 1.1, 1.2), "MODELS": {},
    "OTHERS": {"pythia-12b": ("pythia-12b", 1)}, "TABLE_3": {"alpaca": 4.0},
}  # fmt: skip


def table(rows: int = 400) -> Lengths:
    """Prompts of 1 to 300 tokens, answers of 1 to 900."""
    rng = np.random.default_rng(0)
    draw = lambda mean, top: rng.geometric(1 / mean, rows).clip(1, top)  # noqa: E731
    return Lengths(draw(80, 300), draw(250, 900), np.full(rows, np.nan))


DATA = Data({**alise.SYSTEMS, **alise.MEMORY_SYSTEMS}, {"t": table()}, Variants())


def test_requests_that_no_model_has_room_for_are_left_out():
    lengths = Lengths(np.array([0, 10, 2000, 40]), np.array([5, 5, 100, 2008]), np.full(4, np.nan))
    kept = alise.fitting(lengths)
    assert kept.input.tolist() == [10, 40]
    with pytest.raises(ValueError, match="2048"):
        alise.fitting(Lengths(np.array([3000]), np.array([1]), np.array([np.nan])))


def test_systems_get_the_same_requests_and_no_true_lengths():
    first, second = (cases.simulate(DATA, Case(name, "t", 1.0, 0.5, 3)).workload for name in (VLLM, ALISE))
    assert (first.arrival == second.arrival).all() and (first.output == second.output).all()
    assert first.max_tokens is not None and (first.max_tokens == cases.CONTEXT - first.input).all()
    # At twice the rate the same requests come twice as fast.
    faster = cases.simulate(DATA, Case(VLLM, "t", 2.0, 0.5, 3)).workload
    n = len(first)
    assert (faster.output[:n] == first.output).all() and faster.arrival[:n] == pytest.approx(first.arrival / 2)


def test_int8_kv_is_read_at_half_the_cost():
    """With equal memory pressure, none at all, INT8 KV still makes steps shorter: half the bytes are read."""
    full, small = (cases.serve(DATA, Case(name, "t", 1.5, 1.0, 0)) for name in (VLLM, UNREAD))
    assert small["normalised"] < full["normalised"]


@pytest.mark.slow
def test_a_search_stops_runs_that_are_beyond_the_limit():
    case = Case(VLLM, "t", 8.0, 1.0, 0)
    whole = cases.normalised(cases.simulate(DATA, case))
    with pytest.raises(cases.Exceeded):
        cases.simulate(DATA, case, limit=0.9 * whole)
    assert cases.normalised(cases.simulate(DATA, case, limit=1.01 * whole)) == whole
    rate = cases.find_knee(DATA, Knee(replace(case, rate=1.0), 0.1))["rate"]
    at, beyond = (cases.serve(DATA, replace(case, rate=x))["normalised"] for x in (rate, 1.06 * rate))
    assert at <= 0.1 < beyond


@pytest.mark.slow
def test_alise_beats_fcfs_and_the_oracle_beats_all():
    names = (ORCA, VLLM, FULL, ALISE, KNOWN)
    at = {name: cases.serve(DATA, Case(name, "t", 1.2, 4.0, 0))["normalised"] for name in names}
    assert at[KNOWN] <= 1.02 * at[ALISE] and at[ALISE] < at[FULL] < at[VLLM] < at[ORCA]


@pytest.mark.slow
def test_swapping_is_at_least_as_good_as_the_other_memories():
    found = {name: cases.serve(DATA, Case(name, "t", 4.5, 80 / 60, 0)) for name in alise.MEMORY_SYSTEMS}
    normalised = {name: point["normalised"] for name, point in found.items()}
    assert normalised[SWAP] < normalised[AGAIN] and normalised[SWAP] < normalised[DEFER]
    assert normalised[AUTO] == pytest.approx(normalised[SWAP], rel=0.1)
    assert found[SWAP]["swaps"] > 0 == found[SWAP]["recomputed"] < found[AGAIN]["recomputed"]


def test_execution_time_is_linear_in_the_prompt_and_is_estimated_well():
    """Fig. 5 and Eq. 3 to 5."""
    short, long = (runtime.alone(DATA, runtime.Alone("opt-13b", VLLM, outputs)) for outputs in (16, 256))
    assert short["prefill"] == long["prefill"] == sorted(short["prefill"])
    assert long["decode"] == pytest.approx(short["decode"], rel=0.01)
    line = runtime.line(short["decode"])
    assert line["error"] < 0.01 and line["slope"] > 0
    found = runtime.estimated(DATA, Case(ALISE, "t", 0.3, 10.0, 0))
    assert 0 < found["error"] < 8 and found["preempted"] < 10 and found["seconds"] > 200 * 0.035


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experiments on the tiny model."""
    for name, value in EXPERIMENT.items():
        monkeypatch.setattr(alise, name, value)
    monkeypatch.setattr(cases, "CONCURRENCY", 8)
    monkeypatch.setattr(alise, "MODELS", {"opt-13b, 1 V100": alise.FIRST})
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


def command(tmp_path: Path, longest: int) -> list[str]:
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls and more " * (20 + 7 * i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lengths = table(60)
    pairs = zip(lengths.input.clip(1, longest), lengths.output.clip(1, longest), strict=True)
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n" + "".join(f"{i},{o}\n" for i, o in pairs))
    files = ["--alpaca", str(tmp_path / "prompts.jsonl"), "--sharegpt", str(tmp_path / "lengths.csv")]
    common = ["--processes", "1", "--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "docs")]
    return ["paper", "alise", *files, *common]


@pytest.mark.slow
def test_the_page_is_written(quick, tmp_path):
    out = tmp_path / "docs"
    own = ["--system", "own=priority", "--predictor", "noisy:0.1"]
    assert main([*command(tmp_path, 900), "--minutes", "0.05", "--seeds", "2", *own]) == 0
    text = (out / "alise.md").read_text()
    models = "pythia-12b", "Alpaca, opt-13b, 1 V100"
    for expected in ("(Fig. 6), ShareGPT", "2.10×", "46.0 %", "p99", "/s, own |", *models):
        assert expected in text
    assert {f.name for f in out.glob("*.png")} == {
        f"alise_{name}.png" for name in ("rate", "memory", "latency", "runtime")
    }
    kept = json.loads((out / "alise.json").read_text())
    assert len(kept["simulated"]["latency"]["sample"][VLLM]) <= cases.SAMPLE
    assert "[ALISE](alise.md)" in (out / "README.md").read_text()


@pytest.mark.slow
def test_the_engine_fills_its_columns(quick, tmp_path):
    settings = [part for setting in SMALL if "kv_cache" not in setting for part in ("--set", setting)]
    work = [
        "--engine",
        "--engine-jobs",
        "6",
        "--engine-tokens",
        "20",
        "--engine-kv",
        "128",
        "--engine-rate",
        "500",
        "--repeats",
        "2",
    ]
    assert main([*command(tmp_path, 150), *work, *settings]) == 0
    kept = json.loads((tmp_path / "docs" / "alise.json").read_text())
    assert set(kept) == {"engine"}
    systems = kept["engine"]["systems"]["sharegpt"]
    assert [len(systems[name]["jct"]) for name in (VLLM, DEFER, SWAP, SWAP_KNOWN)] == [3] * 4
    text = (tmp_path / "docs" / "alise.md").read_text()
    assert "| ShareGPT | defer |" in text and "| mean latency of 200 requests below FCFS" in text


def test_unreadable_data_is_named(tmp_path, capsys):
    files = ["--alpaca", "none.jsonl", "--sharegpt", "none.csv"]
    assert main(["paper", "alise", *files, "--out", str(tmp_path), "--engine"]) == 2
    assert "none." in capsys.readouterr().err
