"""Steps that are split over several devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers import quick_xla
from helpers.paths import TESTS
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.engine.startup import for_device


@pytest.mark.slow
def test_several_devices_write_what_one_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.tensor_parallel"], capture_output=True, text=True, timeout=900, cwd=TESTS,
        env=quick_xla.environment({"JAX_NUM_CPU_DEVICES": "4"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: there are 1 devices, not 2; on a CPU set JAX_NUM_CPU"):
        for_device(EngineConfig(tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(draft_devices={"a": 1}, tensor_parallel_size=2), "drafters are split over the same devices"),
        (dict(tp=2), "unknown setting 'tp'; use tensor_parallel_size here"),
        (dict(tensor_parallel_size=0), "tensor_parallel_size: "),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load(**settings)
