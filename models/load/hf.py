"""Loads Hugging Face folders: safetensors, tokenizer, chat template and generation config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.errors import ModelLoadError
from jaxspec.models.config import DecoderConfig
from jaxspec.models.load.files import read_json
from jaxspec.models.load.generation_config import read_generation_config, sampling_of
from jaxspec.models.load.hf_config import decoder_config
from jaxspec.models.load.hf_tokenizer import load_tokenizer
from jaxspec.models.load.loaded import LoadedModel
from jaxspec.models.load.stored import FLOATS, StoredMatrix
from jaxspec.models.load.weights import HF_NAMES, check_tensors, lazy_weights

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
#: Type in a safetensors file -> dtype in which its tensors are read.
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float32}


class SafetensorsFolder:
    """Memory-mapped tensors of a folder. Raises `ModelLoadError` if files are missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = [_open(folder / name) for name in self._file_names()]
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118
        slices = {key: file.get_slice(key) for key, file in self._file_of.items()}
        self._shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
        self._types: dict[str, str] = {key: part.get_dtype() for key, part in slices.items()}

    def _file_names(self) -> list[str]:
        if (self.folder / _WHOLE).is_file():
            return [_WHOLE]
        if not (self.folder / _INDEX).is_file():
            if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
                raise ModelLoadError(
                    f"{self.folder} has only pickled weights (.bin/.pt), which can run code and are never loaded; "
                    "convert them with transformers: save_pretrained(…) writes safetensors"
                )
            raise ModelLoadError(f"{self.folder} has neither {_WHOLE} nor {_INDEX}")
        shards = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelLoadError(f"{self.folder / _INDEX}: no weight_map")
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name:
                raise ModelLoadError(f"{self.folder / _INDEX}: shard {name!r} lies outside the folder")
            if not (self.folder / name).is_file():
                raise ModelLoadError(f"{self.folder}: shard {name} is missing; is the download complete?")
        return names

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def check(self, name: str) -> None:
        """Raise `ModelLoadError` unless the tensor's type is supported."""
        if (kind := self._types[name]) not in _READ_AS:
            raise ModelLoadError(f"{self.folder}: tensor {name} is of type {kind}; {', '.join(_READ_AS)} can be read")

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its stored dtype, float64 as float32. Raises `ModelLoadError` for unsupported types."""
        self.check(name)
        return np.asarray(self._file_of[name].get_tensor(name)).astype(_READ_AS[self._types[name]], copy=False)

    def matrix(self, name: str) -> StoredMatrix:
        rows, columns = self._shapes[name]
        kind = self._types[name] if self._types[name] in FLOATS else "F32"
        return StoredMatrix(kind, (rows, columns), lambda: self.read(name))


def load_folder(folder: Path, name: str) -> LoadedModel:
    """Load a model folder. Raises `ModelLoadError`."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    raw = read_json(config_file)
    config = decoder_config(raw, str(config_file))
    tensors = SafetensorsFolder(folder)
    check_tensors(config, tensors, HF_NAMES, ignored=_unused(config, tensors), where=str(folder))
    generation = read_generation_config(folder)
    declared = None if generation is None else generation.eos_token_id
    if declared is None:
        declared = raw.get("eos_token_id")
    tokenizer = load_tokenizer(folder, declared if isinstance(declared, list) else [declared])
    # An end token without an embedding can never be sampled.
    ends = tuple(id for id in tokenizer.eos_token_ids if id < config.vocab_size)
    tokenizer = replace(tokenizer, eos_token_ids=ends)
    config = replace(config, eos_token_ids=tokenizer.eos_token_ids, bos_token_id=tokenizer.bos_token_id)
    sampling = {} if generation is None else sampling_of(generation)
    return LoadedModel(config, lazy_weights(config, tensors, HF_NAMES), tokenizer, name, sampling)


def _unused(config: DecoderConfig, tensors: SafetensorsFolder) -> list[str]:
    """Tensors to ignore: the copy of a tied head, rotary tables, and output biases that are all zero."""
    unused = [name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")]
    if config.tie_embeddings:
        unused.append(HF_NAMES["head"])
    biases = (name for name in tensors.shapes if name.endswith("self_attn.o_proj.bias"))
    return unused + [name for name in biases if not tensors.read(name).any()]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as e:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({e}); is the download complete?") from e
