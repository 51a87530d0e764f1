"""Training a length probe: what its examples are, that it learns, and the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.distillation import LONGEST, TARGET, answers
from helpers.jsonl import write_lines
from jaxspec.draft.distill.data import Corpus, Row, corpus, lost
from jaxspec.models.load.probe_file import load_probe
from jaxspec.train_predictor import probe as command
from jaxspec.train_predictor.probe import STRIDE, errors, positions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [row | {"capped": i % 3 == 0} for i, row in enumerate(answers(60))]
    return write_lines(tmp_path_factory.mktemp("probe") / "answers.jsonl", rows)


@pytest.fixture(scope="module")
def text(data: Path) -> Corpus:
    return corpus([str(data)], TARGET, LONGEST, data.parent)


def test_examples_are_positions_of_the_training_answers(text: Corpus) -> None:
    found = positions(text, np.random.default_rng(0))
    assert len(found.features) == len(found.left) == len(found.ended) > 100
    assert found.features.shape[1:] == text.features.shape[2:] and found.left.min() == 1
    longest = (text.length - text.start)[~text.held_out].max()
    assert found.left.max() <= longest - 1 and 0.3 < found.ended.mean() < 0.9
    most = (text.length - text.start - 1)[~text.held_out].sum()
    assert len(found.left) <= most / STRIDE + (~text.held_out).sum()


def test_ended_says_whether_the_answer_is_whole(text: Corpus) -> None:
    assert 0.5 < text.ended.mean() < 0.8


def test_the_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Corpus
) -> None:
    monkeypatch.setattr(command, "load_model", lambda name: TARGET)
    out = tmp_path / "p.safetensors"
    options = ["--data", str(data), "--out", str(out), "--work", str(data.parent), "--longest", str(LONGEST)]
    assert command.main([*options, "--steps", "300", "--width", "16"]) == 0
    said = capsys.readouterr().out
    assert "positions of" in said and "after 25% of the answer" in said and f"--set length_probe={out}" in said
    assert "(the training median: " in said and f"wrote {out} (" in said
    assert "warning: errors come from " in said
    # Lengths of random text cannot be known, but that 8 to 29 tokens are usual can.
    (start, own, _), *_ = errors(load_probe(out, TARGET.config), text, 0)
    assert start == 0 and own < 0.5


def test_answers_that_are_cut_for_training_are_counted_and_measured_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Corpus
) -> None:
    monkeypatch.setattr(command, "load_model", lambda name: TARGET)
    options = ["--data", str(data), "--out", str(tmp_path / "p"), "--work", str(tmp_path), "--steps", "1"]
    assert command.main([*options, "--longest", str(LONGEST)]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert command.main([*options, "--longest", "19"]) == 0
    cut = capsys.readouterr().out.splitlines()
    room = text.start < 19 - 8
    counted = f"of 120 answers {(text.length[room] > 19).sum()} are cut at 19 tokens of prompt and answer (--longest), "
    left_out = f"{(~room).sum()} are left out because the prompt has 11 tokens or more (--longest)"
    assert (~room).sum() > 0 and counted + left_out in cut and not any("(--longest)" in line for line in whole)
    (measured,) = (line for line in whole if line.startswith("measured on"))
    assert measured in cut, "the same answers, also those that were cut or left out"
    medians = [[line[line.index("(the") :] for line in said if "(the" in line] for said in (whole, cut)]
    assert medians[0] == medians[1] != []


def test_an_interrupt_ends_training_in_one_message(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_model", lambda name: TARGET)
    monkeypatch.setattr(command, "trained", interrupted)
    options = ["--data", str(data), "--out", str(tmp_path / "p"), "--work", str(data.parent)]
    assert command.main([*options, "--longest", str(LONGEST)]) == 130
    said, resume = capsys.readouterr().err.splitlines()[-2:]
    assert "interrupted; features that are complete are kept in" in said and resume.startswith("python -m")


def test_what_is_lost_is_said_in_one_sentence() -> None:
    row = Row("", [1, 2], [3] * 30, True)
    assert lost([row], 32, "longest") == ""
    assert lost([row, row._replace(answer=[3])], 31, "longest") == (
        "of 2 answers 1 are cut at 31 tokens of prompt and answer (longest), 1 are left out because they have one token"
    )


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--data", str(tmp_path / "none"), "--out", "x"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("jaxspec.train_predictor.probe: --data: cannot read") and line.count("\n") == 1
    monkeypatch.setitem(sys.modules, "optax", None)
    assert command.main(["--data", "unread", "--out", "x"]) == 2
    assert '".[train]"' in capsys.readouterr().err
