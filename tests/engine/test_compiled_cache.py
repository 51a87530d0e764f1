"""Compiled programs whose files are damaged, or cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest

from jaxspec import compiled_cache

#: In a process of its own: JAX's cache is set up once.
PROGRAM = """
import resource, sys
from pathlib import Path
import jax
from jaxspec.compilation import compile_ahead, use_cache
from jaxspec.compiled_cache import _whole

def compile_again(function):
    jax.clear_caches()
    compile_ahead(function, jax.ShapeDtypeStruct((3,), "float32"))

def double(x):
    return 2 * x

def triple(x):
    return 3 * x

folder = Path(sys.argv[1])
use_cache(str(folder))
compile_again(double)
[file] = folder.glob("jit_double-*-cache")
whole = file.read_bytes()
for damaged in (b"", whole[: len(whole) // 2], b"noise"):
    file.write_bytes(damaged)
    compile_again(double)
    assert _whole(file.read_bytes())
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
compile_again(triple)
assert not list(folder.glob("jit_triple-*")) and file.exists()
"""


def test_damaged_programs_are_written_again_and_a_full_disk_leaves_none(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("jit_double is compiled again, its file cannot be read") == 3
    assert "jit_triple cannot be kept for later starts: OSError: [Errno 27]" in done.stderr


def test_only_damaged_files_of_the_program_are_removed(tmp_path: Path) -> None:
    whole = zlib.compress(b"abc" * 100)
    files = {"jit_a-1-cache": whole, "jit_a-2-cache": whole[:9], "jit_a-3-cache": b"", "jit_b-1-cache": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    compiled_cache.remove_damaged(tmp_path, "jit_a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jit_a-1-cache", "jit_b-1-cache"]


def test_other_warnings_are_shown_as_before() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled_cache.watch()
        compiled_cache.watch()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else"]


@pytest.mark.parametrize(
    ("part", "error"), [("pathlib.Path.unlink", PermissionError("not yours")), ("zlib.decompress", MemoryError("full"))]
)
def test_a_file_that_cannot_be_read_or_removed_stays(
    part: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "jit_a-1-cache").write_bytes(b"")
    monkeypatch.setattr(part, fail)
    compiled_cache.remove_damaged(tmp_path, "jit_a")
    assert f"cannot remove jit_a-1-cache, which may be damaged: {error}" in caplog.text
