"""Distillation's settings and command, `python -m jaxspec.draft.distill`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.distillation import LONGEST, TARGET, VOCAB, answers, settings
from helpers.jsonl import write_lines
from helpers.paths import CONFIGS
from helpers.tiny_drafters import as_decoder
from jaxspec.config import ConfigError
from jaxspec.draft.distill import __main__ as command
from jaxspec.draft.distill.begin import begin
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.models.load.drafter_file import load_drafter, save_drafter


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with answers as training data."""
    folder = tmp_path_factory.mktemp("distill")
    write_lines(folder / "answers.jsonl", answers(40))
    return folder


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("data: [a]\nout: o.safetensors\nlayerz: 2\n", "layerz"),
        ("data: []\nout: o.safetensors\n", "data"),
        ("data: [a]\nout: o\n", "out: .*safetensors"),
        ("data: [a]\nout: o.safetensors\nbegin: middle\n", "begin"),
        ("data: [a]\nout: o.safetensors\nregression: -1\n", "regression"),
        ("- data\n", "mapping"),
        ("data: [\n", "cannot read"),
    ],
)
def test_bad_settings_are_named(content: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=word):
        DistillConfig.load(path)


@pytest.mark.parametrize("path", sorted((CONFIGS / "distill").glob("*.yaml")), ids=str)
def test_the_presets_load(path: Path) -> None:
    assert DistillConfig.load(path, steps=3).steps == 3


def test_the_command_trains_with_the_whole_vocabulary(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxspec.models.load.load_model", lambda name: TARGET)
    out, preset = work / "out" / "d.safetensors", work / "preset.yaml"
    preset.write_text(f"data: [{work / 'answers.jsonl'}]\nwork: {work}\nlongest: {LONGEST}\nbatch: 4\n")
    changes = [f"--set={change}" for change in (f"out={out}", "steps=1", "passes=1", "conditioned=false")]
    assert command.main(["--config", str(preset), *changes]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tiny, preset: 80 answers") and f"{VOCAB} of {VOCAB} tokens" in said[0]
    assert said[1].startswith("warning: hits and accepted length come from ")
    steps = [line for line in said if line.startswith("step ")]
    assert [line.split(",")[0] for line in steps] == ["step 0", "step 1"]
    assert all("(most frequent successor: " in line for line in steps) and "untrained: " in steps[1]
    assert f"wrote {out} (" in "\n".join(said)
    assert said[-1].startswith("next: python -m jaxspec.serve --model smollm2-135m ") and str(out) in said[-1]
    assert command.main(["--config", str(preset), *changes]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[2] == "resumed after step 1" and again[-1] == said[-1]
    _, weights = load_drafter(out, TARGET.config, TARGET.weights)
    assert weights["vocab"].tolist() == list(range(VOCAB))
    assert (work / "preset" / "curve.json").exists()


def test_files_that_are_not_there_are_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("jaxspec.models.load.load_model", lambda name: pytest.fail("loaded"))
    (here := tmp_path / "a.jsonl").touch()
    (preset := tmp_path / "p.yaml").write_text(f"data: [{here}]\nout: o.safetensors\nwork: {tmp_path}\n")
    for setting, change in (("data", f"data=[{here}, /no/such.jsonl]"), ("begin", "begin=/no/such.safetensors")):
        assert command.main(["--config", str(preset), f"--set={change}"]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"jaxspec.draft.distill: {setting}: cannot read /no/such.")
        assert line.endswith(": No such file or directory\n") and line.count("\n") == 1


@pytest.mark.parametrize("name", ["optax", "orbax.checkpoint"])
def test_without_the_extra_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("jaxspec.draft.distill.train", "jaxspec.train_predictor.checkpoints"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert command.main(["--config", "unread.yaml"]) == 2
    line = capsys.readouterr().err
    assert '".[train]"' in line and line.count("\n") == 1


def test_a_plain_drafter_is_saved_without_a_fusing_map(tmp_path: Path) -> None:
    model = begin(settings(conditioned=False, layers=2), TARGET, np.arange(10, dtype=np.int32))
    save_drafter(model, "tiny", tmp_path / "d")
    config, weights = load_drafter(tmp_path / "d", TARGET.config, TARGET.weights)
    assert config.num_layers == 2 and "fuse" not in weights
    assert not as_decoder(config, weights).conditioned
