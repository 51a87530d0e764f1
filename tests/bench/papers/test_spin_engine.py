"""`jaxspec.bench paper spin` on the engine: who takes turns, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.switching import SIZES, load
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.spin import engine as spin_engine
from jaxspec.bench.papers.spin.engine import CHOICES, NONE, ORACLE
from jaxspec.bench.papers.spin.pipeline import APART, BESIDE
from jaxspec.bench.papers.spin.report import best_alone, pipeline_section, sections
from jaxspec.draft import registry as drafters

DRAFTERS = ("ngram", "conditioned", "perfect")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model with drafters of its own."""
    quiet = {**SIZES, "show_progress": False}
    monkeypatch.setattr("jaxspec.llm.LLM", lambda **given: tiny.llm(**{**given, **quiet}))
    monkeypatch.setattr(drafters, "load", load)
    monkeypatch.setattr(spin_engine, "CHAIN", {"draft": "perfect", "levels": 2})


@pytest.mark.slow
def test_contenders_take_turns_on_one_engine(small: None, tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text('{"turns": ["def owl():"]}\n{"turns": ["x = y + y"]}\n')
    (tmp_path / "sums.jsonl").write_text('{"turns": ["1 + 2 = 3, 2 + 2 ="]}\n')
    data = ["--code", str(tmp_path / "code.jsonl"), "--maths", str(tmp_path / "sums.jsonl")]
    work = ["--engine-prompts", "3", "--engine-concurrency", "2", "--engine-tokens", "8", "--engine-batches", "1", "3"]
    # Drafts in every step, however long the machine takes for one.
    work += ["--set", f"draft=[{', '.join(DRAFTERS)}]", "--set", "tree=chain", "--set", "draft_depth=3"]
    out = ["--repeats", "2", "--out", str(tmp_path / "docs")]
    assert main(["paper", "spin", "--engine", *data, *work, *out]) == 0
    engine: dict[str, Any] = json.loads((tmp_path / "docs" / "spin.json").read_text())["engine"]
    assert list(engine["systems"]) == [NONE, *DRAFTERS, *CHOICES, ORACLE]
    for name, own in engine["systems"].items():
        assert len(own["goodput"]) == len(own["code"]) == len(own["maths"]) == 2 and min(own["goodput"]) > 0
        assert (max(own["switches"]) > 0) <= (name in CHOICES)
    assert max(engine["systems"][NONE]["accepted"]) == 1 < min(engine["systems"]["perfect"]["accepted"])
    assert sum(engine["best"].values()) == 3  # prompts that differ
    assert list(engine["batches"]) == ["1", "3"] and set(engine["batches"]["1"]) == {NONE, "chain", "auto"}
    assert min(engine["batches"]["3"]["chain"]["accepted"]) > 2
    assert best_alone(engine) in DRAFTERS
    text = (tmp_path / "docs" / "spin.md").read_text()
    assert all(f"| {name} |" in text for name in engine["systems"]) and "| 3 |" in text
    assert (tmp_path / "docs" / "spin_choices.png").stat().st_size > 0


def test_one_device_is_not_enough_for_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "spin", "--pipeline", "--out", str(tmp_path)]) == 2
    assert "--pipeline needs two devices" in capsys.readouterr().err


def test_the_pipelines_table() -> None:
    turns = {"1": [50.0, 60.0], "2": [60.0, 66.0], "heuristic": [60.0, 66.0]}
    steps = {"1": 10, "2": 20, "heuristic": 20}
    own = {name: [{"tokens_per_s": s, "steps": steps[name]} for s in speeds] for name, speeds in turns.items()}
    pipeline = {
        "draft": "owl",
        "levels": 3,
        "concurrency": 8,
        "tokens": 5,
        "places": {APART: own, BESIDE: {"1": own["1"]}},
    }
    text = pipeline_section(pipeline)
    assert f"| {APART} | 2 | 63.0 (60 … 66) | 1.15× (1.10 … 1.20) | 2.0 |" in text
    assert f"| {BESIDE} | 1 | 55.0 (50 … 60) | 1.00× (1.00 … 1.00) | 1.0 |" in text
    assert sections({"pipeline": pipeline})["pipeline"] == text
