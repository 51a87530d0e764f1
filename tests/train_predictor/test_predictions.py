"""Predictions of held-out answers: what is learnt from, the probe's positions, the table, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.distillation import TARGET, answers
from helpers.jsonl import write_lines
from helpers.predictors import FakeEncoder, FakePredictor
from jaxspec.bench.papers import recorded
from jaxspec.draft.distill.data import corpus
from jaxspec.models.drafter import feature_width
from jaxspec.models.length_probe import LengthProbe, median_left
from jaxspec.models.load.probe_file import save_probe
from jaxspec.train_predictor import predictions as command
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.data import TEST, TRAIN, VALIDATION

EVERY = 6


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two answers to each of 60 prompts; the predictor knows their mean length."""
    monkeypatch.setattr(command, "load_model", lambda name: TARGET)
    monkeypatch.setattr("jaxspec.predict.build.load_proxy", lambda name, model: FakePredictor(19))
    monkeypatch.setattr("jaxspec.predict.build.load_encoder", lambda name: FakeEncoder())
    return write_lines(tmp_path / "answers.jsonl", [r | {"capped": i % 5 == 0} for i, r in enumerate(answers(60))])


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: [{data}]\nout: unread.safetensors\n")
    return path


def test_the_command(tmp_path: Path, config: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = LengthProbe(feature_width(TARGET.config), 8, nnx.Rngs(0))
    save_probe(probe, "tiny", weights := tmp_path / "probe.safetensors")
    out = tmp_path / "predictions.jsonl"
    others = [r | {"output_ids": [1] * (9 + i % 7)} for i, r in enumerate(answers(60))]
    again = write_lines(tmp_path / "again.jsonl", others)
    options = ["--config", str(config), "--probe", str(weights), "--every", str(EVERY), "--out", str(out)]
    options += ["--again", str(again)]
    assert command.main(options) == 0
    said = capsys.readouterr().out
    assert "| proxy |" in said and "| blend |" in said and "quantiles cover: 50% " in said and "| 75% |" in said
    assert "The best that the prompt allows, from" in said
    rows = command.read(PredictorConfig.load(config), TARGET)[TEST]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["output_tokens"] for line in lines] == [len(row.answer) for row in rows] and len(rows) > 5
    assert {line["proxy"] for line in lines} == {19}
    text = corpus([str(data)], TARGET, 64, tmp_path)
    row, line = rows[0], lines[0]
    (same,) = (i for i in range(len(text)) if text.tokens[i, : text.length[i]].tolist() == row.prompt + row.answer)
    known = len(row.prompt) + EVERY  # the feature of the token before the last known one
    wanted = median_left(probe(jnp.asarray(text.features[same, known - 2])[None]))[0]
    assert line["left"][0] == pytest.approx(float(wanted), rel=0.02)
    assert len(line["left"]) == -(-(len(row.answer) - EVERY) // EVERY), "one for each EVERY tokens before the last"
    assert recorded.read(out).every == EVERY
    assert command.main([*options[:4], "--every", "64"]) == 0
    assert "so the probe was never asked" in capsys.readouterr().out


def test_neighbours_are_answers_of_the_training_part(config: Path) -> None:
    settings = PredictorConfig.load(config)
    parts = command.read(settings, TARGET)
    again = [*parts[:TEST], [*parts[TEST], *(row for row in parts[TRAIN] if row.ended)]]
    found = command.at_arrival(settings, TARGET, None, again)[TEST]
    new, known = found["retrieval"][: len(parts[TEST])], found["retrieval"][len(parts[TEST]) :]
    assert (new == 19).all() and (known != 19).mean() > 0.8
    # Nor does anything that was cut, or the test part, teach the others.
    cut = [[], [row._replace(ended=False) for row in parts[VALIDATION]], parts[VALIDATION]]
    found = command.at_arrival(settings, TARGET, None, cut)[TEST]
    assert (found["retrieval"] == 19).all() and (found["blend"] == pytest.approx(19))


def test_predictions_follow_the_probe() -> None:
    assert command.again(np.asarray([90.0, 20.0]), 10, 20.0) == pytest.approx([20, 10 + 30, 20 + 20])


def test_errors_are_one_line(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--config", str(config), "--set", "data=[nowhere.jsonl]"]) == 2
    assert "data: cannot read nowhere.jsonl" in capsys.readouterr().err
    other = write_lines(tmp_path / "other.jsonl", [{"prompt_ids": [1, 2], "output_ids": [3, 4]}])
    assert command.main(["--config", str(config), "--again", str(other)]) == 2
    assert "has too few other answers" in capsys.readouterr().err
    assert command.main(["--config", str(config), "--probe", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
