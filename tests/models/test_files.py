"""Files written at once or not at all: whole, readable by whom the umask says, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers import tiny
from helpers.tiny_drafters import as_decoder
from jaxspec.models.load.drafter_file import save_drafter
from jaxspec.models.load.files import replacing


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """What a new file's permissions are."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def text(path: Path) -> None:
    with replacing(path) as new:
        new.write_text("new")


def tensors(path: Path) -> None:
    with replacing(path) as new:
        save_file({"a": np.zeros(3, np.float32)}, new)


def drafter(path: Path) -> None:
    model = tiny.model()
    vocab = np.arange(8, dtype=np.int32)
    weights = {**model.weights, "head": model.weights["embed"].T[:, vocab], "vocab": vocab}
    save_drafter(as_decoder(model.config, weights), "tiny", path)


@pytest.mark.parametrize("write", [text, tensors, drafter])
def test_files_have_the_usual_permissions(write: Callable[[Path], None], mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o600)
    for _ in range(2):  # also in place of an older one
        write(path)
        assert path.stat().st_mode & 0o777 == mode
        assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as new:  # noqa: PT012  (it is what is tested)
        new.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"
    with replacing(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as one, replacing(tmp_path / "file") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"  # the last to end
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_tensors_are_whole(tmp_path: Path) -> None:
    tensors(tmp_path / "file")
    assert load_file(tmp_path / "file")["a"].tolist() == [0, 0, 0]
