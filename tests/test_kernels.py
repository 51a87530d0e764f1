"""The CPU kernels against numpy; attention and commit are tested with the step (test_step.py), beside XLA's."""

from __future__ import annotations

import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.kernels import build, cpu
from jaxspec.step import executor


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40), depth=st.integers(1, 70), width=st.integers(1, 140), layers=st.integers(1, 3),
    data=st.data(),
)  # fmt: skip
def test_products_of_every_shape(rows: int, depth: int, width: int, layers: int, data: Any) -> None:
    cpu.load()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.normal(size=(rows, depth)).astype(np.float32)
    w = rng.normal(size=(layers, depth, width)).astype(np.float32)
    layer = data.draw(st.integers(0, layers - 1))
    y = cpu.linear(jnp.asarray(x), jnp.asarray(cpu.panels(w)), width, jnp.int32(layer))
    np.testing.assert_allclose(y, x @ w[layer], atol=1e-4)


def test_a_product_large_enough_for_threads() -> None:
    cpu.load()
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(33, 512)).astype(np.float32), rng.normal(size=(2, 512, 1000)).astype(np.float32)
    panels = jnp.asarray(cpu.panels(w))
    run = jax.jit(lambda x, i: cpu.linear(x, panels, 1000, i))
    for layer in (0, 1, 0):
        np.testing.assert_allclose(run(x, jnp.int32(layer)), x @ w[layer], atol=5e-4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = jnp.zeros((1, 2, 8, 32))
    with pytest.raises(ValueError, match="does not fit"):
        cpu.linear(jnp.zeros((3, 9)), weight, 64)
    with pytest.raises(ValueError, match="width 65"):
        cpu.linear(jnp.zeros((3, 8)), weight, 65)
    with pytest.raises(ValueError, match="float32"):
        cpu.linear(jnp.zeros((3, 8), jnp.bfloat16), weight, 64)


def test_limits_of_python_and_c_agree() -> None:
    source = "".join(path.read_text() for path in build.sources())
    for name in ("PANEL", "LANES", "MAX_ROWS", "MAX_DIM", "MAX_PAGE"):
        assert f"#define {name} {getattr(cpu, name)}" in source


def test_what_the_kernels_cannot_do_is_left_to_xla() -> None:
    config = EngineConfig(kernels="auto")
    assert executor.pick_layers(config, tiny.config()).name == "native"
    assert executor.pick_layers(config, tiny.config(head_dim=8)).name == "xla"
    assert executor.pick_layers(EngineConfig(dtype="bfloat16"), tiny.config()).name == "xla"
    assert executor.pick_layers(EngineConfig(kernels="xla"), tiny.config()).name == "xla"
    with pytest.raises(ConfigError, match="heads of 8"):
        executor.pick_layers(EngineConfig(kernels="native"), tiny.config(head_dim=8))


def test_without_a_compiler_there_is_a_reason_and_xla(tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "No module ziglang"))
    with pytest.raises(build.KernelsUnavailable, match="No module ziglang"):
        build.build()
    assert not list(tmp_path.rglob("*.so"))
    monkeypatch.setattr(cpu, "load", build.build)
    assert executor.pick_layers(EngineConfig(), tiny.config()).name == "xla"
    assert "No module ziglang" in caplog.text


def test_built_once(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    library = build.build()
    stamp = library.stat().st_mtime_ns
    assert build.build() == library and library.stat().st_mtime_ns == stamp
    assert [p for p in library.parent.iterdir()] == [library]
