"""`jaxspec.bench paper alise`: what is compared, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import tiny
from helpers.small import SMALL
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.alise import experiment as alise
from jaxspec.bench.papers.alise.report import (
    AGAIN,
    ALISE,
    AUTO,
    DEFER,
    FULL,
    KNOWN,
    ORCA,
    SWAP,
    VLLM,
    at_latency,
    throughputs,
)
from jaxspec.sched.sim.workload import Lengths


def table(rows: int = 400) -> Lengths:
    """Prompts of 1 to 300 tokens, answers of 1 to 900."""
    rng = np.random.default_rng(0)
    draw = lambda mean, top: rng.geometric(1 / mean, rows).clip(1, top)  # noqa: E731
    return Lengths(draw(80, 300), draw(250, 900), np.full(rows, np.nan))


def test_the_rate_at_a_latency_lies_between_the_points_around_it():
    points = {"1": 0.05, "2": 0.1, "4": 0.4, "10": 0.9}
    assert at_latency(points, 0.2) == pytest.approx(3.0)
    assert at_latency(points, 0.1) == pytest.approx(2.0)
    assert at_latency(points, 0.01) is at_latency(points, 2.0) is None
    assert throughputs({"a": {"1": {"normalised": 0.1}, "2": {"normalised": 0.4}}}, 0.2) == {"a": pytest.approx(1.5)}


def test_requests_that_no_model_has_room_for_are_left_out():
    lengths = Lengths(np.array([0, 10, 2000, 40]), np.array([5, 5, 100, 2008]), np.full(4, np.nan))
    kept = alise.fitting(lengths)
    assert kept.input.tolist() == [10, 40]
    with pytest.raises(ValueError, match="2048"):
        alise.fitting(Lengths(np.array([3000]), np.array([1]), np.array([np.nan])))


@pytest.mark.slow
def test_alise_beats_fcfs_and_the_oracle_beats_all():
    rates = (0.6, 1.2)
    names = (ORCA, VLLM, FULL, ALISE, KNOWN)
    found = {name: alise.curve(alise.SYSTEMS[name], table(), rates, 240, 0) for name in names}
    # Who is far above the ceiling is not asked about higher rates.
    assert found[ORCA]["0.6"]["normalised"] > alise.CEILING and set(found[ORCA]) == {"0.6"}
    at = {name: curve["0.6"]["normalised"] for name, curve in found.items()}
    assert at[KNOWN] <= 1.02 * at[ALISE] and at[ALISE] < at[FULL] < at[VLLM] < at[ORCA]


@pytest.mark.slow
def test_swapping_is_at_least_as_good_as_the_other_memories():
    found = {
        name: alise.curve(system, table(), (4.5,), 80, 0)["4.5"] for name, system in alise.MEMORIES.items()
    }  # fmt: skip
    normalised = {name: point["normalised"] for name, point in found.items()}
    assert normalised[SWAP] < normalised[AGAIN] and normalised[SWAP] < normalised[DEFER]
    assert normalised[AUTO] == pytest.approx(normalised[SWAP], rel=0.1)
    assert found[SWAP]["swaps"] > 0 == found[SWAP]["recomputed"] < found[AGAIN]["recomputed"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experiments on the tiny model."""
    monkeypatch.setattr(alise, "RATES", {"alpaca": (10, 40), "sharegpt": (0.5, 1.5)})
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **s: tiny.llm(**s | {"show_progress": False}))


def command(tmp_path: Path, longest: int) -> list[str]:
    rows = [{"turns": ["Tell me of owls"], "reference": "Owls " * (4 + i)} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lengths = table(60)
    pairs = zip(lengths.input.clip(1, longest), lengths.output.clip(1, longest), strict=True)
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n" + "".join(f"{i},{o}\n" for i, o in pairs))
    files = ["--alpaca", str(tmp_path / "prompts.jsonl"), "--sharegpt", str(tmp_path / "lengths.csv")]
    return ["paper", "alise", *files, "--out", str(tmp_path / "docs")]


@pytest.mark.slow
def test_the_page_is_written(quick, tmp_path):
    out = tmp_path / "docs"
    assert main([*command(tmp_path, 900), "--minutes", "0.5"]) == 0
    text = (out / "alise.md").read_text()
    for expected in ("(Fig. 6), ShareGPT | 2.10×", "(Fig. 9), ShareGPT | 46.0 %", "Alpaca, 40/s", "p99"):
        assert expected in text
    assert {f.name for f in out.glob("*.png")} == {"alise_rate.png", "alise_memory.png", "alise_latency.png"}
    kept = json.loads((out / "alise.json").read_text())
    assert len(kept["simulated"]["latency"]["systems"][VLLM]["sample"]) <= alise.SAMPLE


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
    assert [len(kept["engine"]["systems"]["sharegpt"][name]["jct"]) for name in (VLLM, DEFER, SWAP, KNOWN)] == [2] * 4
    text = (tmp_path / "docs" / "alise.md").read_text()
    assert "…" in next(line for line in text.splitlines() if line.startswith("| mean response latency"))
    assert "| ShareGPT | defer |" in text


def test_unreadable_data_is_named(tmp_path, capsys):
    assert (
        main(["paper", "alise", "--alpaca", "none.jsonl", "--sharegpt", "none.csv", "--out", str(tmp_path), "--engine"])
        == 2
    )
    assert "none." in capsys.readouterr().err
