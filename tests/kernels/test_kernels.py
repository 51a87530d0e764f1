"""The CPU kernels against numpy; attention and commit are tested in test_step.py, as XLA's are."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orjson.orjson
import pytest

from helpers import tiny
from helpers.packed import packed
from jaxspec.bench import BenchError, kernels
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.kernels import build, cpu
from jaxspec.kernels import packed as layout
from jaxspec.step import runner as model_runner


def test_limits_of_python_and_c_agree() -> None:
    source = "".join(path.read_text() for path in build.sources())
    for module, names in ((cpu, ("LANES", "MAX_ROWS", "MAX_DIM", "MAX_PAGE")), (layout, ("PANEL", "GROUP", "SUPER"))):
        for name in names:
            assert f"#define {name} {getattr(module, name)}" in source


def test_what_the_kernels_cannot_do_is_left_to_xla() -> None:
    config = EngineConfig(dtype="float32")
    assert model_runner.pick_layers(config, tiny.config()).name == "native"
    assert model_runner.pick_layers(config, tiny.config(head_dim=8)).name == "xla"
    for dtype in ("bfloat16", "float16"):
        assert model_runner.pick_layers(EngineConfig(dtype=dtype), tiny.config()).name == "xla"
    assert model_runner.pick_layers(EngineConfig(kernels="xla"), tiny.config()).name == "xla"
    with pytest.raises(ConfigError, match="heads of 8"):
        model_runner.pick_layers(EngineConfig(kernels="native", dtype="float32"), tiny.config(head_dim=8))


def test_a_gpu_has_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert model_runner.pick_layers(EngineConfig(), tiny.config()).name == "gpu"
    assert model_runner.pick_layers(EngineConfig(), tiny.config(head_dim=48)).name == "xla"
    assert model_runner.pick_layers(EngineConfig(kernels="xla"), tiny.config()).name == "xla"
    with pytest.raises(ConfigError, match="not on gpu"):
        model_runner.pick_layers(EngineConfig(kernels="native"), tiny.config())


class Compilers:
    """A PATH with nothing on it but what is added, and a cache with nothing in it."""

    def __init__(self, folder: Path, real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.real, self.log, self.cache = folder, real, folder / "log", folder / "cache" / "kernels"
        monkeypatch.setenv("JAXSPEC_CACHE", str(folder / "cache"))
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("CC", raising=False)
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ziglang" else found(name))

    def add(self, name: str, then: str) -> None:
        """A compiler that notes its call and does `then`, a shell command; $out is the file to write."""
        path = self.folder / name
        lines = (
            "#!/bin/sh", f'said="{name} $1 $2"', 'while [ "$1" != -o ]; do shift; done; out=$2',
            f'echo "$said" "${{out%/*}}" >> {self.log}', "PATH=/bin:/usr/bin", then,
        )  # fmt: skip
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    def works(self, name: str) -> None:
        self.add(name, f'cp {self.real} "$out"')

    def fails(self, name: str) -> None:
        self.add(
            name, f"echo '{name}: note' >&2; echo '{name}: error: too old' >&2; echo 1 error generated >&2; exit 1"
        )

    def called(self) -> list[str]:
        """The compiler of each library, which is called for every file and to link them, in a folder."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[0] for line in dict.fromkeys(lines)]


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(tmp_path, build.build(), monkeypatch)


def test_without_a_compiler_there_is_a_reason_and_xla(compilers: Compilers, monkeypatch: Any, caplog: Any) -> None:
    with pytest.raises(build.KernelsUnavailable, match=r"no C compiler .* `apt install gcc`.*\.venv/bin/pip.*\[zig\]"):
        build.build()
    assert not list(compilers.cache.glob("*"))
    monkeypatch.setattr(cpu, "load", build.build)
    assert model_runner.pick_layers(EngineConfig(dtype="float32"), tiny.config()).name == "xla"
    assert "apt install gcc" in caplog.text
    with pytest.raises(ConfigError, match="apt install gcc"):
        model_runner.pick_layers(EngineConfig(kernels="native", dtype="float32"), tiny.config())


def test_every_compiler_gets_its_turn(compilers: Compilers, monkeypatch: Any) -> None:
    for name in ("gcc", "clang", "mine", "cc"):
        compilers.fails(name)
    monkeypatch.setenv("CC", "mine --as 'two words'")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    monkeypatch.setattr(sys, "executable", str(compilers.folder / "python"))  # for `python -m ziglang cc`
    compilers.fails("python")
    with pytest.raises(build.KernelsUnavailable) as raised:
        build.build()
    assert compilers.called() == ["mine", "cc", "clang", "gcc", "python"]
    assert compilers.log.read_text().startswith("mine --as two words ")
    for name in compilers.called():
        assert f"{name}: error: too old" in str(raised.value)


def test_the_first_compiler_that_works_is_used(compilers: Compilers, caplog: Any) -> None:
    compilers.fails("cc")
    compilers.works("clang")
    compilers.works("gcc")
    library = build.build()
    assert compilers.called() == ["cc", "clang"] and "cc: error: too old" in caplog.text
    assert library.read_bytes() == compilers.real.read_bytes()
    assert build.build() == library and compilers.called() == ["cc", "clang"]  # neither is tried again


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (":", "does not load"),
        ('echo nonsense > "$out"', "does not load"),
        (f'cp {orjson.orjson.__file__} "$out"', "lacks jaxspec_linear, jaxspec_grouped, jaxspec_columns"),
    ],
)
def test_what_a_compiler_makes_is_looked_at(compilers: Compilers, caplog: Any, then: str, why: str) -> None:
    compilers.add("cc", then)
    compilers.works("gcc")
    library = build.build()
    assert compilers.called() == ["cc", "gcc"] and why in caplog.text
    assert list(compilers.cache.iterdir()) == [library]


def test_a_new_compiler_builds_again(compilers: Compilers, monkeypatch: Any) -> None:
    compilers.works("gcc")
    library = build.build()
    compilers.works("mine")
    monkeypatch.setenv("CC", "mine")
    assert build.build() != library and compilers.called() == ["gcc", "mine"]
    monkeypatch.setenv("CC", "mine -g")
    build.build()
    assert compilers.called() == ["gcc", "mine", "mine"]
    compilers.add("mine", f'cp {compilers.real} "$out"  # a later version')
    build.build()
    assert compilers.called() == ["gcc", "mine", "mine", "mine"]
    monkeypatch.delenv("CC")
    assert build.build() == library and len(compilers.called()) == 4


def test_a_library_outlives_its_compiler(compilers: Compilers) -> None:
    compilers.works("gcc")
    library = build.build()
    (compilers.folder / "gcc").unlink()
    assert build.build() == library


@pytest.mark.parametrize("size", [0, 5000, 20_000])
def test_a_damaged_library_is_built_again(compilers: Compilers, size: int) -> None:
    compilers.works("gcc")
    library = build.build()
    library.unlink()  # not overwritten: it is loaded
    library.write_bytes(compilers.real.read_bytes()[:size])
    assert build.build() == library and compilers.called() == ["gcc", "gcc"]
    assert library.read_bytes() == compilers.real.read_bytes()
    (compilers.folder / "gcc").unlink()
    library.unlink()
    library.write_bytes(compilers.real.read_bytes()[:size])
    with pytest.raises(build.KernelsUnavailable):
        build.build()


@pytest.mark.slow
def test_built_once(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    library = build.build()
    stamp = library.stat().st_mtime_ns
    assert build.build() == library and library.stat().st_mtime_ns == stamp
    assert [p for p in library.parent.iterdir()] == [library]


INSTALLED = [
    name
    for name in ("cc", "clang", "gcc", "zig")
    if (importlib.util.find_spec("ziglang") if name == "zig" else shutil.which(name))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_every_compiler_there_is_builds_them_without_a_warning(tmp_path: Any, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Wall", "-Wextra", "-Werror"))
    cpu.load(name)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(9, 64)).astype(np.float32), rng.normal(size=(1, 64, 40)).astype(np.float32)
    panels = jnp.asarray(packed(w))
    with cpu.built_by(name):
        run = jax.jit(lambda x: cpu.linear(x, panels, 40)).lower(x)
    assert f"@{name}jaxspec_linear" in run.as_text()
    np.testing.assert_allclose(run.compile()(x), x @ w[0], atol=1e-4)


def test_the_benchmark_compares_compilers(tmp_path: Path, monkeypatch: Any) -> None:
    for name, small in (("LAYERS", 2), ("VOCAB", 64)):
        monkeypatch.setattr(kernels, name, small)
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    compiler = shlex.join(build.compilers()[0])
    options = ["--compilers", compiler, f"{compiler} -DANY", "--tokens", "3", "--contexts", "32", "--repeats", "4"]
    assert kernels.run(parser.parse_args([*options, "--cpu-time", "--json", str(tmp_path / "x.json")])) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    kernels_of = [f"{kind} {name}" for kind in ("F32", "Q4_1") for name in (compiler, f"{compiler} -DANY")]
    assert list(found["products_ms"]["3"]) == ["XLA", *kernels_of]
    assert {len(times) for times in found["attention_ms"]["32"].values()} == {4}
    with pytest.raises(BenchError, match=r"nonsense: .*apt install gcc"):
        kernels.run(parser.parse_args(["--compilers", "nonsense"]))
