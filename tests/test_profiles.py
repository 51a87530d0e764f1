"""Measured times are kept for the device and the programs they are of, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxspec.step import profiles
from jaxspec.step.profiles import Profile, median_seconds, remembered


class Measure:
    def __init__(self, value: float = 0.5):
        self.value, self.calls = value, 0

    def __call__(self) -> Profile:
        self.calls += 1
        return {"1": self.value, "8": 2 * self.value}


def test_once_for_a_key_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Measure()
    for _ in range(2):
        assert remembered(("a", 1), ["1", "8"], measure, tmp_path) == {"1": 0.5, "8": 1.0}
    assert measure.calls == 1
    remembered(("a", 2), ["1", "8"], measure, tmp_path)
    assert measure.calls == 2
    monkeypatch.setattr(profiles, "device", lambda: "another")
    remembered(("a", 1), ["1", "8"], measure, tmp_path)
    assert measure.calls == 3


@pytest.mark.parametrize("content", ["", "[1]", "3", '{"1": 1.0}', '{"1": 1.0, "8": -1.0}', '{"1": "x", "8": 1.0}'])
def test_a_file_of_something_else_is_replaced(tmp_path: Path, content: str) -> None:
    remembered("k", ["1", "8"], Measure(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert remembered("k", ["1", "8"], Measure(3.0), tmp_path) == json.loads(path.read_text()) == {"1": 3.0, "8": 6.0}


def test_after_a_week_it_is_measured_again(tmp_path: Path) -> None:
    remembered("k", ["1", "8"], Measure(), tmp_path)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, path.stat().st_mtime - profiles.KEPT - 60))
    assert remembered("k", ["1", "8"], Measure(3.0), tmp_path)["8"] == 6.0


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert remembered("k", ["1", "8"], Measure(), tmp_path / "file")["8"] == 1.0


def test_the_median_is_of_all_runs() -> None:
    calls: list[int] = []
    assert median_seconds(lambda: calls.append(1), 7) >= 0
    assert len(calls) == 7
