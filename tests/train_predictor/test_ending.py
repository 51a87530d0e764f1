"""How training commands end: the files that were written, what comes next, and what is wrong before they begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.config import ConfigError
from jaxspec.train_predictor import ending
from jaxspec.train_predictor.command import check_folder, check_output


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_files_have_sizes_and_commands_follow(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.bin").write_bytes(bytes(2_340_000))
    Path("b.bin").write_bytes(bytes(1_200))
    ending.ended(["a.bin", Path("b.bin")], "one", "two")
    assert capsys.readouterr().out.splitlines() == [
        "wrote a.bin (2.3 MB)", "wrote b.bin (1.2 kB)", "next: one", "  or: two",
    ]  # fmt: skip


def test_an_interrupted_command_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending.interrupted("jaxspec.some", ["--set", "data=[a b]"], "rows are kept") == 130
    assert capsys.readouterr().err.splitlines() == [
        "jaxspec.some: interrupted; rows are kept; to resume:", "python -m jaxspec.some --set 'data=[a b]'",
    ]  # fmt: skip


def test_answers_elsewhere_are_named() -> None:
    default, other = "trained/m/answers.jsonl", "other.jsonl"
    assert all("answers" not in command for command in ending.training_commands("path/m", default))
    predictor, probe, drafter = ending.training_commands("path/m", other)
    assert predictor.endswith("--set target=path/m --set 'data=[other.jsonl]'")
    assert probe.endswith("--target path/m --data other.jsonl")
    assert drafter.endswith("--set target=path/m --set 'data=[other.jsonl]'")


def test_a_server_gets_all_that_is_trained() -> None:
    begin = "python -m jaxspec.serve --model path/m --config configs"
    assert ending.serve_command("path/m", predictor="p") == f"{begin}/default.yaml --set predictor_model=p"
    folder = Path("trained/m")
    folder.mkdir(parents=True)
    (folder / "m-eagle.safetensors").touch()
    assert ending.serve_command("path/m", probe="q") == (
        f"{begin}/gittins.yaml --draft suffix --draft {folder}/m-eagle.safetensors --set length_probe=q"
    )


def test_outputs_that_cannot_be_written_are_named() -> None:
    check_output("out", "new/deep/file")
    assert Path("new/deep").is_dir() and not list(Path("new/deep").iterdir())
    Path("file").touch()
    for check, file, said in (
        (check_output, "new", "out: new is a folder"),
        (check_output, "file/a", "out: cannot write to file: File exists"),
        (check_folder, "file/a", "out: cannot write to file/a: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}$"):
            check("out", file)
