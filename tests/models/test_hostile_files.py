"""Files that were damaged, or made to do harm: each is refused by an error that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers import checkpoints, tiny
from helpers.tiny_drafters import as_decoder, conditioned
from jaxspec.errors import ModelLoadError
from jaxspec.models.load import load_model
from jaxspec.models.load.drafter_file import load_drafter, save_drafter

CONFIG = checkpoints.config()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = list(checkpoints.hf_tensors(CONFIG).items())
    return checkpoints.write_hf(tmp_path / "model", CONFIG, [dict(shards[:4]), dict(shards[4:])])


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        load_model(str(path))
    assert path.name in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/passwd", "a/b", "..", "\0", "y" * 9000, 5, None, ["x"], {}]
)
def test_shards_lie_in_the_folder(folder: Path, place: Any) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    change(index, weight_map=places | {next(iter(places)): place})
    refused(folder, "outside the folder|names of files|is missing")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_deeply_nested_json(folder: Path, file: str) -> None:
    (folder / file).write_text('{"a":' * 100_000)
    refused(folder, "not readable")


@pytest.mark.parametrize(
    "values",
    [{"model_type": ["llama"]}, {"hidden_act": {}}, {"rms_norm_eps": "small"}, {"num_hidden_layers": 2**40},
    {"head_dim": 2**31},
     {"vocab_size": 10**400}, {"num_attention_heads": 2**30}, {"rope_scaling": 5}, {"rope_theta": []},
     {"hidden_size": "y" * 9000},
     {"quantization_config": [1]}, {"rope_parameters": {"rope_type": {}}}, {"eos_token_id": {}},
     {"eos_token_id": [[1]]},
     {"eos_token_id": -1}],
)  # fmt: skip
def test_settings_of_any_kind(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    refused(folder, ".")


@pytest.mark.parametrize("template", [5, 1.5, True, ["x"], {"default": 3}])
def test_templates_that_are_no_text(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", chat_template=template)
    refused(folder, ".")


def gguf(tmp_path: Path) -> tuple[Path, bytes]:
    path = checkpoints.write_gguf(tmp_path / "model.gguf", CONFIG, checkpoints.gguf_tensors(CONFIG))
    return path, path.read_bytes()


def after(data: bytes, key: str, number: bytes, skip: int = 4) -> bytes:
    """The file with another number `skip` bytes after a field's key: after its type."""
    at = data.index(key.encode()) + len(key) + skip
    return data[:at] + number + data[at + len(number) :]


U64 = struct.Struct("<Q").pack


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:8] + U64(2**62) + data[16:],  # tensors
        lambda data: data[:16] + U64(2**62) + data[24:],  # fields
        lambda data: data[:24] + U64(2**63 - 1) + data[32:],  # length of the first key
        lambda data: after(data, "tokenizer.ggml.token_type", U64(2**62), 8),  # entries of an array
        lambda data: after(data, "tokenizer.ggml.tokens", U64(2**40), 8),
        lambda data: after(data, "llama.block_count", struct.pack("<I", 2**31)),
        lambda data: after(data, "llama.attention.key_length", struct.pack("<I", 2**31)),
        lambda data: after(data, "llama.attention.head_count", struct.pack("<I", 2**31)),
        lambda data: after(data, "llama.attention.head_count", struct.pack("<I", 0)),
        lambda data: after(data, "general.architecture", U64(3)),
        lambda data: data[:200], lambda data: b"", lambda data: b"GGUF",
    ],
)  # fmt: skip
def test_numbers_of_a_gguf_header(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path, data = gguf(tmp_path)
    path.write_bytes(damage(data))
    refused(path, ".")


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w | {"layers.0.down.scale": w["layers.0.down.scale"][:3]},
        lambda w: w | {"vocab": w["vocab"] + 10_000}, lambda w: w | {"vocab": w["vocab"] - 10_000},
        lambda w: w | {"vocab": w["vocab"].reshape(1, -1)}, lambda w: {k: v for k, v in w.items() if k != "norm"},
    ],
)  # fmt: skip
def test_drafters(tmp_path: Path, damage: Callable[[Any], Any]) -> None:
    path, target = tmp_path / "drafter.safetensors", tiny.model()
    save_drafter(as_decoder(*conditioned(target)), "tiny", path)
    sizes = json.dumps({"layers": 1, "hidden": target.config.hidden_size, "vocabulary": target.config.vocab_size})
    about = {"format": "jaxspec-draft-3", "target": "tiny", "sizes": sizes}
    stored = load_file(path)
    save_file(stored, path, about)
    load_drafter(path, target.config, target.weights)  # as it should be
    save_file({name: np.ascontiguousarray(value) for name, value in damage(stored).items()}, path, about)
    with pytest.raises(ModelLoadError, match=r"drafter\.safetensors"):
        load_drafter(path, target.config, target.weights)


@pytest.mark.parametrize(
    "sizes",
    [
        "[]",
        "{}",
        '{"layers": 1099511627776, "hidden": 32, "vocabulary": 257}',
        '{"layers": 1.5, "hidden": 32, "vocabulary": 257}',
        "x",
        "[" * 10**5,
    ],
)
def test_metadata_of_drafters(tmp_path: Path, sizes: str) -> None:
    path, target = tmp_path / "drafter.safetensors", tiny.model()
    save_drafter(as_decoder(*conditioned(target)), "tiny", path)
    save_file(load_file(path), path, {"format": "jaxspec-draft-3", "target": "tiny", "sizes": sizes})
    with pytest.raises(ModelLoadError, match=r"drafter\.safetensors"):
        load_drafter(path, target.config, target.weights)
