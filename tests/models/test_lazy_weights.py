"""Weights are read when they are used, one at a time, in the dtype in which they are stored, and nothing keeps them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoints import config, gguf_tensors, hf_tensors, write_gguf, write_hf
from helpers.serving import eventually
from helpers.tiny_drafters import as_decoder
from jaxspec.draft import registry
from jaxspec.kernels import cpu
from jaxspec.kernels.packed import pack
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import device_weights, stacked_weights
from jaxspec.models.load import LoadedModel, load_model
from jaxspec.models.load.drafter_file import load_drafter, save_drafter
from jaxspec.models.load.gguf import GGUFTensors
from jaxspec.models.load.hf import SafetensorsFolder
from jaxspec.models.load.hf_layouts import LLAMA
from jaxspec.models.load.parts import layer_shapes, part_shapes
from jaxspec.models.load.weights import LazyWeights, of_target

BFLOAT16 = ml_dtypes.bfloat16


def folder(path: Path, c: DecoderConfig, dtype: Any = np.float32, **other: Any) -> LoadedModel:
    """A Hugging Face folder in `dtype`, loaded. `other`: dtypes of the projections of these names."""
    tensors = {n: t.astype(other.get(n.split(".")[-2], dtype)) for n, t in hf_tensors(c).items()}
    return load_model(str(write_hf(path, c, [tensors])))


def gguf_file(path: Path, c: DecoderConfig) -> LoadedModel:
    return load_model(str(write_gguf(path.with_suffix(".gguf"), c, gguf_tensors(c))))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read, in order."""
    names: list[str] = []
    for source in (SafetensorsFolder, GGUFTensors):

        def read(self: Any, name: str, read: Callable[[Any, str], np.ndarray] = source.read) -> np.ndarray:
            names.append(name)
            return read(self, name)

        monkeypatch.setattr(source, "read", read)
    return names


@pytest.mark.parametrize(("load", "query"), [(folder, "q_proj"), (gguf_file, "attn_q")], ids=["folder", "gguf"])
def test_reading_a_weight_reads_its_tensors_and_keeps_nothing(
    tmp_path: Path, reads: list[str], load: Callable[[Path, DecoderConfig], LoadedModel], query: str
) -> None:
    c = config()
    weights = load(tmp_path / "m", c).weights
    assert isinstance(weights, LazyWeights)
    assert "norm" in weights and "layers.2.o" not in weights
    assert len(weights) == len(list(weights)) == 3 + 6 * c.num_layers
    assert reads == []
    first = weights["layers.1.qkv"]
    assert len(reads) == 3 and query in reads[0]
    second = weights["layers.1.qkv"]
    assert len(reads) == 6 and reads[3:] == reads[:3]
    np.testing.assert_array_equal(first, second)
    assert not np.shares_memory(first, second)
    kept = weakref.ref(first if first.base is None else first.base)
    del first
    assert kept() is None


@pytest.mark.parametrize(
    ("stored", "read"),
    [(np.float32, np.float32), (np.float16, np.float16), (BFLOAT16, BFLOAT16), (np.float64, np.float32)],
)
def test_weights_have_the_stored_dtype(tmp_path: Path, stored: Any, read: Any) -> None:
    c = config(qkv_bias=True, o_bias=True)
    weights = folder(tmp_path, c, stored).weights
    chex.assert_type(list(weights.values()), read)
    tensor = hf_tensors(c)["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(weights["layers.1.down"], tensor.astype(stored).astype(read).T)
    shapes = {name.removeprefix("layers.0."): w.shape for name, w in weights.items() if name.startswith("layers.0.")}
    assert layer_shapes(c) == shapes


def test_parts_of_different_dtypes_are_promoted_exactly(tmp_path: Path) -> None:
    c = config()
    weights = folder(tmp_path, c, BFLOAT16, k_proj=np.float16, up_proj=np.float32).weights
    found = [weights[f"layers.0.{part}"].dtype for part in ("qkv", "gate_up", "o")]
    assert found == [np.float32, np.float32, BFLOAT16]
    t = hf_tensors(c)
    dtypes = {"q": BFLOAT16, "k": np.float16, "v": BFLOAT16}
    parts = [t[f"model.layers.0.self_attn.{p}_proj.weight"].astype(d).astype(np.float32).T for p, d in dtypes.items()]
    np.testing.assert_array_equal(weights["layers.0.qkv"], np.hstack(parts))


class Watched(Mapping[str, np.ndarray]):
    """Weights that assert that of those read before at most the last is still in memory."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self._weights, self._read = weights, list[Any]()

    def __getitem__(self, name: str) -> np.ndarray:
        eventually(self._few_kept)
        weight = self._weights[name].copy()
        self._read.append(weakref.ref(weight))
        return weight

    def _few_kept(self) -> bool:
        # What JAX's threads are done with it frees in its next operation or when Python collects garbage.
        gc.collect(0)
        return sum(ref() is not None for ref in self._read) <= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [BFLOAT16, np.float16])
def test_one_weight_at_a_time_goes_to_the_device(tmp_path: Path, tied: bool, stored: Any) -> None:
    """Also: half precision widened on the device is what it is on the host."""
    c = config(tie_embeddings=tied, num_layers=3)
    weights = folder(tmp_path, c, stored).weights
    wide = {name: weight.astype(np.float32) for name, weight in weights.items()}
    head = {"head": wide["embed"].T} if tied else {}
    chex.assert_trees_all_equal(device_weights(c, Watched(weights), "float32"), wide | head)
    for dtype in ("bfloat16", "float16"):
        narrow = {name: weight.astype(jnp.dtype(dtype)) for name, weight in (wide | head).items()}
        # An array that needs no cast may stay where it is: the device is the host here.
        source = weights if jnp.dtype(dtype) == stored else Watched(weights)
        chex.assert_trees_all_equal(device_weights(c, source, dtype), narrow)
    stacked, width = stacked_weights(c, Watched(weights), pack), 2 * c.intermediate_size
    chex.assert_trees_all_equal(stacked, stacked_weights(c, wide, pack))
    small = stacked_weights(c, weights, pack)  # in the stored data type
    assert small["layers.gate_up"].nbytes < 0.6 * stacked["layers.gate_up"].nbytes
    cpu.load()
    unit = jnp.eye(c.hidden_size)
    for packed in (stacked, small):
        product = cpu.linear(unit, packed["layers.gate_up"], width, jnp.int32(2))
        np.testing.assert_array_equal(product, wide["layers.2.gate_up"])
        np.testing.assert_array_equal(cpu.linear(unit, packed["head"], c.vocab_size), (wide | head)["head"])


def test_weights_that_are_on_the_device_stay_there() -> None:
    c = config(tie_embeddings=True)
    given = {"embed": jnp.ones((c.vocab_size, c.hidden_size), jnp.bfloat16), "norm": jnp.ones(c.hidden_size)}
    with jax.transfer_guard("disallow"):
        out = device_weights(c, given, "bfloat16")
    assert out["embed"].unsafe_buffer_pointer() == given["embed"].unsafe_buffer_pointer()
    chex.assert_type(list(out.values()), jnp.bfloat16)


def test_drafters_of_a_lazy_target_are_lazy(tmp_path: Path, reads: list[str]) -> None:
    c = config(num_layers=3)
    target = folder(tmp_path, c, BFLOAT16)
    kept, weights = registry.truncated(target, 2)
    assert kept.num_layers == 2
    assert set(weights) == {n for n in target.weights if not n.startswith("layers.2.")} | {"vocab"}
    assert reads == []
    np.testing.assert_array_equal(weights["head"], target.weights["head"])
    assert reads == ["lm_head.weight"] * 2


def test_a_trained_drafter_reads_the_lazy_targets_embedding_and_head(tmp_path: Path, reads: list[str]) -> None:
    c = config()
    target = folder(tmp_path / "m", c, BFLOAT16)
    vocab = np.arange(0, 40, 2, dtype=np.int32)
    given = dict(registry.truncated(target, 1)[1]) | {"vocab": vocab}
    given = {n: w if n == "vocab" else w.astype(np.float32) for n, w in given.items()}
    save_drafter(as_decoder(replace(c, num_layers=1), given), "m", tmp_path / "d")
    reads.clear()
    _, weights = load_drafter(tmp_path / "d", c, target.weights)
    assert reads == [] and of_target(weights) == {"embed"}
    np.testing.assert_array_equal(weights["embed"], target.weights["embed"])
    np.testing.assert_array_equal(weights["head"], target.weights["head"][:, vocab].astype(np.float32))
    largest = np.abs(given["layers.0.qkv"]).max(0)
    assert (np.abs(weights["layers.0.qkv"] - given["layers.0.qkv"]) <= largest / 254 + 1e-6).all()


_PEAK = """
import sys, threading, time
import jax
import transformers  # reads the tokenizer; its own memory is not the model's
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from jaxspec.models.load import load_model
from jaxspec.step.xla import XlaLayers

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def watch():
    while not stop.wait(0.001):
        peak.append(anonymous())

jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
stop, peak = threading.Event(), [before := anonymous()]
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[1])
decoder = XlaLayers().decoder(model.config, model.weights, "bfloat16")
after = anonymous()
stop.set()
thread.join()
assert str(decoder.head[...].dtype) == "bfloat16"
print(max(*peak, after) - before, after - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_little_more_than_the_checkpoint(tmp_path: Path) -> None:
    """Device arrays included, which on a CPU are in the same memory."""
    c = config(hidden_size=1024, intermediate_size=4096, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64)
    rng = np.random.default_rng(0)
    made = {LLAMA.names[p]: rng.standard_normal(s, np.float32).astype(BFLOAT16) for p, s in part_shapes(c).items()}
    tensors = {name.format(i): tensor for name, tensor in made.items() for i in range(c.num_layers)}
    size = sum(t.nbytes for t in tensors.values())
    assert 200e6 < size < 300e6
    write_hf(tmp_path, c, [tensors])
    child = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, after = map(int, child.stdout.split())
    assert size < after <= peak < 1.3 * size, f"peak {peak / size:.2f}, at the end {after / size:.2f} of the checkpoint"
