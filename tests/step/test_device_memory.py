"""How much of a GPU the engine may use, and how the KV pool is sized from it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.cards import CARDS, FRACTION, VARIABLES, Card, install
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.step import device_memory
from jaxspec.step.device_memory import RESERVE, DeviceMemory, MemoryUse, claim_memory, pool_pages

GB = 10**9


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """JAX has no devices yet, and the environment says nothing."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(device_memory, "_initialised", lambda: False)
    return monkeypatch


def test_jax_takes_the_configured_fraction(fresh: pytest.MonkeyPatch) -> None:
    claim_memory(0.85)
    assert os.environ[FRACTION] == "0.85"


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environment_decides(fresh: pytest.MonkeyPatch, name: str) -> None:
    fresh.setenv(name, "false" if "PREALLOCATE" in name else "0.5")
    before = {name: os.environ.get(name) for name in VARIABLES}
    claim_memory(0.85)
    assert {name: os.environ.get(name) for name in VARIABLES} == before


def test_too_late_if_the_devices_are_initialised(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(device_memory, "_initialised", lambda: True)
    claim_memory(0.85)
    assert FRACTION not in os.environ


PROGRAM = f"""
import os
import jaxspec.engine.engine, jaxspec.llm, jaxspec.serve.app
import jax
from jaxspec.step.device_memory import _initialised, claim_memory
number = jax.config.values["jax_num_cpu_devices"]
assert not _initialised(), "an import initialises the devices"
claim_memory(0.8)
assert os.environ.pop("{FRACTION}") == "0.8"
assert jax.config.values["jax_num_cpu_devices"] == number
before = len(jax.devices())
assert _initialised()
claim_memory(0.8)
assert "{FRACTION}" not in os.environ
assert jax.config.values["jax_num_cpu_devices"] == number and len(jax.devices()) == before
"""


def test_nothing_initialises_the_devices_before() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("fraction", "utilization", "share"),
    [
        (0.9, 0.9, 0.9),  # `claim_memory` made it the fraction: not applied twice
        (0.5, 0.9, 0.5),  # the user gave JAX less
        (0.95, 0.6, 0.6),  # the user gave JAX more
        (None, 0.9, 0.75),  # JAX was initialised with its default
        (None, 0.3, 0.3),
    ],
)
def test_usable_memory(
    monkeypatch: pytest.MonkeyPatch, fraction: float | None, utilization: float, share: float
) -> None:
    card = Card("h100", fraction or 0.75, in_use=GB)
    install(monkeypatch, card)
    if fraction is None:
        monkeypatch.delenv(FRACTION)
    memory = DeviceMemory.of(card, utilization)
    assert memory is not None
    assert memory.total == pytest.approx(CARDS["h100"])
    assert memory.usable == pytest.approx(share * CARDS["h100"])
    assert memory.available == memory.usable - GB


def test_the_new_name_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, card := Card("l4", 0.5))
    monkeypatch.delenv(FRACTION)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    memory = DeviceMemory.of(card, 0.9)
    assert memory is not None
    assert memory.total == pytest.approx(CARDS["l4"])


def test_a_device_that_does_not_say() -> None:
    assert DeviceMemory.of(Card("l4", None), 0.9) is None


# Sizing

CONFIG = EngineConfig()
MEMORY = DeviceMemory("card (0)", 100 * GB, 90 * GB, 0)
MODEL = MemoryUse("the model", 16 * GB, 4 * 2**20, GB, tables=GB)
OTHER = DeviceMemory("card (1)", 20 * GB, 18 * GB, GB)


def pages(*uses: MemoryUse, longest: int = 8192, dtype: str = "bfloat16", **settings: int) -> int:
    devices = {0: MEMORY, 1: OTHER}
    return pool_pages(EngineConfig.load(**settings), dtype, [MODEL, *uses], devices, longest)


def test_the_pool_gets_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert pages() == (90 * GB - 16 * GB - GB - 2 * GB - RESERVE) // (4 * 2**20)
    for part in ("card (0)", "weights (bfloat16) 14.90 GiB", "temporaries at most 1.86 GiB", f"{pages() * 32} tokens"):
        assert part in caplog.text


def test_a_drafter_on_the_same_device_shares_it() -> None:
    """Its pool has as many pages; two programs are in flight, and both may be the one with the larger temporaries."""
    drafter = MemoryUse("small", 2 * GB, 2**20, 3 * GB)
    assert pages(drafter) == (90 * GB - 18 * GB - GB - 6 * GB - RESERVE) // (5 * 2**20)


def test_a_drafter_on_its_own_device_takes_nothing_of_the_targets(caplog: pytest.LogCaptureFixture) -> None:
    light = MemoryUse("light", 2 * GB, 2**19, 2 * GB, device=1)
    with caplog.at_level("INFO"):
        assert pages(light) == pages()
    assert "card (1)" in caplog.text and "light" in caplog.text
    heavy = MemoryUse("heavy", 2 * GB, 2**20, 3 * GB, device=1)
    assert pages(heavy) == (18 * GB - GB - 2 * GB - 6 * GB - RESERVE) // 2**20 < pages()


def test_the_number_of_pages_is_bounded() -> None:
    tiny = MemoryUse("the model", GB, 1024, GB)
    assert pool_pages(CONFIG, "float32", [tiny], {0: MEMORY}, 512) == device_memory._MOST_PAGES


def test_kv_cache_tokens_overrides() -> None:
    assert pages(kv_cache_tokens=1000) == 32
    with pytest.raises(ConfigError, match=r"kv_cache_tokens: 1000000 tokens take 122.07 GiB, and 67.99 GiB are left"):
        pages(kv_cache_tokens=1000000)


def test_weights_that_do_not_fit() -> None:
    drafter = MemoryUse("small", 80 * GB, 2**20, GB)
    with pytest.raises(ConfigError) as error:
        pages(drafter, dtype="float32")
    for part in (
        "gpu_memory_utilization: the weights do not fit", "89.41 GiB in float32", "the model 14.90 GiB",
        "small 74.51 GiB", "83.82 GiB of 93.13 GiB", "dtype: bfloat16", "fewer drafters (draft)",
    ):  # fmt: skip
        assert part in str(error.value)


def test_a_pool_smaller_than_a_request() -> None:
    tight = MemoryUse("small", 90 * GB - 19 * GB - RESERVE - 100 * 2**20, 0, GB)
    with pytest.raises(ConfigError, match="would hold 800 tokens, fewer than one request of 1024") as error:
        pages(tight)
    for part in ("weights (bfloat16) 14.90 GiB", "tables 0.93 GiB", "max_num_batched_tokens", "fewer drafters"):
        assert part in str(error.value)
    assert "dtype: bfloat16" not in str(error.value)
    assert pages(tight, longest=512) == 25


def test_a_limited_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tokens = pages() * 32
        assert "limited" not in caplog.text
        pages(longest=10**7)
    assert f"limited to the {tokens} tokens of the KV pool, not 10000000" in caplog.text
