"""`jaxspec.bench predictor`: formulations trained side by side, Table 2 of SSJF, and the place of ALISE's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import prompts_with_lengths as texts
from helpers import tiny
from helpers.predictors import FakeEncoder
from jaxspec.bench.__main__ import main
from jaxspec.bench.papers.alise import predictors as alise_predictors
from jaxspec.bench.papers.ssjf import predictor_report as predictor_page
from jaxspec.bench.papers.ssjf.experiment import trained
from jaxspec.bench.papers.ssjf.predictor import baselines, worth
from jaxspec.models.load.bert import LoadedEncoder
from jaxspec.train_predictor.data import TEST, TRAIN, Corpus, prepare


@pytest.mark.slow
def test_the_ablation_trains_measures_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxspec.train_predictor.data.load_bert", lambda source, layers: texts.encoder())
    rows, preset, out = tmp_path / "rows.jsonl", tmp_path / "tiny.yaml", tmp_path / "results"
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts.rows(160)))
    preset.write_text(f"data: [{rows}]\nout: unread.safetensors\nwork: {tmp_path}\nlongest: 32\nwidth: 16\n")
    steps = [f"--set={c}" for c in ("steps=10", "head_steps=20", "every=10", "warmup=2", "batch=16")]
    command = ["predictor", "--config", str(preset), *steps, "--repeats", "1", "--out", str(out)]
    copy = tmp_path / "copy.json"
    assert main([*command, "--formulations", "reg_l1", "binary", "--json", str(copy)]) == 0
    kept = json.loads((out / "predictor.json").read_text())
    assert json.loads(copy.read_text()) == kept
    found = kept["ablation"]["formulations"]
    assert set(found) == {"reg_l1", "binary"}
    for one in found.values():
        assert one["steps"] == 30 and one["mae"] > 0 and one["throughput"] > 0
        assert 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["p99"]
    page = (out / "predictor.md").read_text()
    assert f"| regression (L1) | 0.615 | {found['reg_l1']['accuracy']:.3f} | 0.615 |" in page
    assert "| binary classes | – | – |" in page, "two classes have no accuracy over five"
    assert "| accuracy | 0.781 / 0.712 / 0.634 | 0.821 / 0.856 / 0.744 | – | – | – | – |" in page
    assert (out / "predictor.png").read_bytes().startswith(b"\x89PNG")
    assert "| regression (L1) | 0.615 |" in trained(out / "predictor.json")["table 2, trained here"]

    monkeypatch.setattr(alise_predictors, "SERVED", 40)
    monkeypatch.setattr(alise_predictors, "ASKED", 20)
    monkeypatch.setattr(alise_predictors, "PROMPTS", 5)
    proxy = str(tmp_path / "ablation-reg_l1" / "predictor.safetensors")
    monkeypatch.setattr("jaxspec.predict.build.load_encoder", lambda source: FakeEncoder())
    monkeypatch.setattr("jaxspec.models.load.load_model", lambda source: tiny.model())
    assert main([*command, "--retrieval", proxy]) == 0
    kept = json.loads((out / "predictor.json").read_text())
    assert kept["ablation"]["formulations"].keys() == found.keys(), "joined to what there was"
    again = kept["retrieval"]["repeating prompts"]
    assert again["retrieval"]["error_ratio"] < again["proxy"]["error_ratio"]
    assert f"| {again['retrieval']['accuracy']:.3f} |" in (out / "predictor.md").read_text()

    monkeypatch.setattr("jaxspec.train_predictor.data.prepare", lambda config: cut(*prepare(config)))
    assert main([*command, "--retrieval", proxy]) == 2
    assert "every answer of the test part was cut" in capsys.readouterr().err

    capsys.readouterr()
    assert main([*command, "--set=data=[none.jsonl]"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxspec.bench: data: ") and line.count("\n") == 1


def cut(encoder: LoadedEncoder, data: Corpus) -> tuple[LoadedEncoder, Corpus]:
    """The same with all answers of the test part cut."""
    return encoder, replace(data, capped=data.capped | (data.part == TEST))


def test_what_predicts_without_reading() -> None:
    lengths = np.asarray([10, 20, 40, 40, 7, 9, 100, 128])
    data = Corpus(
        ["a", "b", "c", "d", "e", "e", "f", "f"],
        [np.zeros(1, np.int32)] * 8,
        lengths,
        lengths == 128,
        np.asarray([TRAIN] * 4 + [TEST] * 4, np.int8),
    )
    found = baselines(data, np.asarray([15.0, 35.0]))
    median, twin = found["the training part's median"], found["another answer to the same prompt"]
    assert median["rows"] == 4 and median["mae"] == pytest.approx((23 + 21 + 70) / 3, abs=1e-3)
    assert median["accuracy"] == 0 and median["tau"] is None
    assert twin["mae"] == pytest.approx((2 + 2 + 28) / 3, abs=1e-3) and twin["accuracy"] == 1


def test_a_missing_ablation_leaves_papers_pages_as_they_are(tmp_path: Path) -> None:
    assert trained(tmp_path / "predictor.json") == {}


@pytest.mark.slow
def test_knowing_lengths_is_worth_more_than_guessing() -> None:
    rng = np.random.default_rng(0)
    length = rng.geometric(1 / 100, 300)
    known, guessed = (worth(p, length, 1) for p in (length.astype(float), rng.permutation(length).astype(float)))
    assert 20 < known[0] < 70 and known[1] > 1
    assert guessed[0] < known[0] - 15


class Memory:
    """Recalls what it was told, and else says the same of all."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        return np.asarray([float(self.known.get(text, 50)) for text in texts])

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        self.known |= dict(zip(texts, lengths, strict=True))


class Same:
    def predict(self, texts: Sequence[str]) -> np.ndarray:
        return np.full(len(texts), 50.0)


def test_a_learning_predictor_learns_the_lengths_of_the_prompts_it_predicted() -> None:
    rng = np.random.default_rng(0)
    rows = alise_predictors.repeating(np.arange(400), rng)
    assert len(rows) == 1500 and len(np.unique(rows)) <= 200
    lengths = rng.integers(1, 200, 400)

    def compare(served: int) -> dict[str, Any]:
        both = {"proxy": Same(), "retrieval": Memory()}
        texts = [str(r) for r in rows]
        return alise_predictors.compare(both, texts, lengths[rows], lengths[rows] > 190, served)

    assert 0.5 < compare(0)["retrieval"]["accuracy"] < 0.9, "most prompts are new in the beginning"
    found = compare(1000)
    assert found["retrieval"]["accuracy"] > 0.9 > found["proxy"]["accuracy"]
    assert found["retrieval"]["error_ratio"] < 0.1 < found["proxy"]["error_ratio"]
    assert found["proxy"]["latency_max_ms"] >= found["proxy"]["latency_ms"] > 0
    table = predictor_page.sections({"retrieval": {"repeating prompts": found}})["ALISE table 2"]
    assert f"{found['retrieval']['accuracy']:.3f} |" in table.splitlines()[2]
